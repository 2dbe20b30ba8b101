"""Libraries about images, and collections of layers."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import nn

from tests.zoo.box import Box, library


def _both(box: Box, name: str, model: nn.Module) -> None:
    """Save a model as people save models of such libraries: its state dict, a checkpoint, and whole."""
    box.save(f"{name}.pth", model.state_dict(), model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}
    box.save(f"{name}_checkpoint.pth", content, model)
    box.attempt(f"{name}, whole", lambda: box.save(f"{name}_whole.pt", model, model))


@library("torchvision")
def torchvision(box: Box) -> None:
    """Models as its reference scripts save them, and by TorchScript."""
    from torchvision import models
    from torchvision.models import detection

    for name in ("squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5"):
        _both(box, name, models.get_model(name, num_classes=3))
    resnet = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=2)
    wrapped = {"model": {f"module.{name}": value for name, value in resnet.state_dict().items()}, "args": {"lr": 0.1}}
    box.weights(box.save("resnet_reference.pth", wrapped), resnet)
    finder = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2)
    box.save("ssdlite.pth", finder.state_dict(), finder)
    program = torch.jit.script(models.mobilenet_v3_small(num_classes=2).eval())
    program.save(str(box.path("mobilenet.pt")))
    box.weights("mobilenet.pt", program.state_dict())
    quantised = models.quantization.shufflenet_v2_x0_5(quantize=False)
    box.save("quantizable.pth", quantised.state_dict(), quantised)


@library("kornia")
def kornia(box: Box) -> None:
    """Descriptors and augmentations."""
    from kornia import augmentation, feature

    for name, make in {"hardnet": feature.HardNet, "tfeat": feature.TFeat, "sosnet": feature.SOSNet}.items():
        _both(box, name, make(pretrained=False))
    box.attempt(
        "augment", lambda: box.save("augment.pt", augmentation.AugmentationSequential(augmentation.ColorJitter(0.1)))
    )


@library("monai")
def monai(box: Box) -> None:
    """Nets, and its CheckpointSaver by ignite."""
    from monai.networks import nets
    from monai.networks.utils import save_state

    net = nets.UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(2, 4), strides=(2,))
    _both(box, "unet", net)
    _both(box, "densenet", nets.DenseNet(2, 1, 2, init_features=4, growth_rate=2, block_config=(1, 1)))
    save_state({"net": net, "opt": torch.optim.SGD(net.parameters(), 0.1)}, str(box.path("state.pt")))
    box.weights("state.pt", net)


@library("segmentation-models-pytorch")
def segmentation(box: Box) -> None:
    """save_pretrained of its models."""
    import segmentation_models_pytorch as smp

    model = smp.Unet("timm-mobilenetv3_small_minimal_100", encoder_weights=None, decoder_channels=(8, 8, 8, 8, 8))
    model.save_pretrained(str(box.path("hub/x").parent))
    box.weights("hub", model)
    _both(box, "unet", model)


@library("ultralytics")
def ultralytics(box: Box) -> None:
    """A checkpoint as its trainer writes it, and an exported program."""
    from copy import deepcopy
    from datetime import datetime

    from ultralytics import YOLO

    model = YOLO("yolov8n.yaml").model
    content = {
        "epoch": -1, "best_fitness": None, "model": None, "ema": deepcopy(model).half(), "updates": 3,
        "optimizer": None,
        "train_args": vars(model.args) if hasattr(model.args, "__dict__") else dict(model.args or {}),
        "train_metrics": {}, "date": datetime.now().isoformat(), "version": "8", "scaler": None,
    }  # fmt: skip
    box.weights(box.save("last.pt", content), deepcopy(model).half().state_dict())
    box.save("whole.pt", {"model": model, "ema": None, "optimizer": None})
    box.weights("whole.pt", model.state_dict())


@library("fastai")
def fastai(box: Box) -> None:
    """save and export of a Learner."""
    from fastai.callback.progress import ProgressCallback
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner

    data = [(torch.randn(3), torch.randn(2)) for _ in range(8)]
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    learner = Learner(
        DataLoaders.from_dsets(data, data, bs=4, num_workers=0), net, loss_func=nn.MSELoss(), path=box.folder
    )
    learner.remove_cbs(ProgressCallback)
    with learner.no_logging():
        learner.fit(1)
    learner.save("with_optimizer")
    learner.save("alone", with_opt=False)
    learner.export("exported.pkl")
    box.weights("models/with_optimizer.pth", net)
    box.weights("models/alone.pth", net)


@library("tsai")
def tsai(box: Box) -> None:
    """Models for series."""
    from tsai.models.InceptionTime import InceptionTime
    from tsai.models.TST import TST

    _both(box, "inception", InceptionTime(2, 3, nf=4, depth=2))
    _both(box, "tst", TST(2, 3, 10, n_layers=1, d_model=8, n_heads=2, d_ff=8))


@library("lightly")
def lightly(box: Box) -> None:
    """Heads, and a student with its teacher."""
    from lightly.models.modules import heads

    student = heads.DINOProjectionHead(8, 8, 4, 6)
    _both(box, "dino", student)
    _both(box, "byol", heads.BYOLProjectionHead(8, 8, 4))
    teacher = heads.DINOProjectionHead(8, 8, 4, 6)
    box.save("pair.pt", {"student": student.state_dict(), "teacher": teacher.state_dict(), "epoch": 1})
    box.weights("pair.pt", student, key="student")
    box.weights("pair.pt", teacher, key="teacher")


@library("pytorch-metric-learning")
def metric_learning(box: Box) -> None:
    """Losses that have weights."""
    from pytorch_metric_learning import losses
    from pytorch_metric_learning.utils.logging_presets import c_f  # noqa: F401

    loss = losses.ArcFaceLoss(4, 8)
    trunk = nn.Linear(3, 8)
    box.save("arcface.pth", loss.state_dict(), loss)
    box.save("both.pth", {"trunk": trunk.state_dict(), "loss": loss.state_dict()})
    box.weights("both.pth", trunk, key="trunk")


@library("efficientnet-pytorch")
def efficientnet(box: Box) -> None:
    """Its smallest model."""
    from efficientnet_pytorch import EfficientNet

    model = EfficientNet.from_name("efficientnet-b0", {"num_classes": 2})
    box.save("b0.pth", model.state_dict(), model)


@library("vit-pytorch")
def vit_pytorch(box: Box) -> None:
    """Some of its transformers."""
    from vit_pytorch import SimpleViT, ViT
    from vit_pytorch.cct import CCT

    options: dict[str, Any] = {
        "image_size": 16,
        "patch_size": 8,
        "num_classes": 2,
        "dim": 8,
        "depth": 1,
        "heads": 2,
        "mlp_dim": 8,
    }
    _both(box, "vit", ViT(**options))
    _both(box, "simple", SimpleViT(**options))
    box.attempt(
        "cct", lambda: _both(box, "cct", CCT(img_size=16, embedding_dim=8, num_layers=1, num_heads=2, num_classes=2))
    )


@library("x-transformers")
def x_transformers(box: Box) -> None:
    """A decoder with several kinds of positions and norms."""
    from x_transformers import Decoder, Encoder, TransformerWrapper, XTransformer

    model = TransformerWrapper(
        num_tokens=20, max_seq_len=8, attn_layers=Decoder(dim=16, depth=1, heads=2, rotary_pos_emb=True)
    )
    _both(box, "decoder", model)
    memory = TransformerWrapper(
        num_tokens=20, max_seq_len=8, num_memory_tokens=2, attn_layers=Encoder(dim=16, depth=1, heads=2)
    )
    _both(box, "memory", memory)
    pair = XTransformer(
        dim=16, tie_token_emb=True, enc_num_tokens=20, enc_depth=1, enc_heads=2, enc_max_seq_len=8,
        dec_num_tokens=20, dec_depth=1, dec_heads=2, dec_max_seq_len=8,
    )  # fmt: skip
    _both(box, "pair", pair)


@library("denoising-diffusion-pytorch")
def denoising_diffusion(box: Box) -> None:
    """A checkpoint as its Trainer writes it, with the average in it."""
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet
    from ema_pytorch import EMA

    model = GaussianDiffusion(Unet(8, dim_mults=(1, 2), flash_attn=False), image_size=8, timesteps=4)
    average = EMA(model)
    average.update()
    optimizer = torch.optim.Adam(model.parameters())
    content = {"step": 3, "model": model.state_dict(), "opt": optimizer.state_dict(), "ema": average.state_dict(),
               "scaler": None, "version": "2"}  # fmt: skip
    box.save("model-1.pt", content)
    box.weights("model-1.pt", model, choice="raw")
    box.weights("model-1.pt", average.ema_model.state_dict(), choice="ema")


@library("vector-quantize-pytorch")
def vector_quantize(box: Box) -> None:
    """Codebooks."""
    from vector_quantize_pytorch import FSQ, LFQ, ResidualVQ, VectorQuantize

    made = {
        "vq": VectorQuantize(8, 16, kmeans_init=True),
        "residual": ResidualVQ(dim=8, num_quantizers=2, codebook_size=16),
        "fsq": FSQ([4, 4]),
        "lfq": LFQ(codebook_size=16, dim=8),
    }
    for name, model in made.items():
        box.save(f"{name}.pt", model.state_dict(), model)
        box.attempt(f"{name}, whole", lambda name=name, model=model: box.save(f"{name}_whole.pt", model))


@library("rotary-embedding-torch")
def rotary(box: Box) -> None:
    """Positions."""
    from rotary_embedding_torch import RotaryEmbedding

    model = RotaryEmbedding(dim=8, learned_freq=True)
    _both(box, "rotary", model)


@library("local-attention")
def local_attention(box: Box) -> None:
    """A small transformer."""
    from local_attention import LocalTransformer

    _both(box, "local", LocalTransformer(num_tokens=20, dim=16, depth=1, max_seq_len=16, local_attn_window_size=8))


@library("captum")
def captum(box: Box) -> None:
    """A concept's vectors."""
    from captum.concept import CAV
    from captum.concept._core.concept import Concept

    concepts = [Concept(0, "a", None), Concept(1, "b", None)]
    vectors = CAV(
        concepts, "layer", {"weights": torch.randn(2, 4), "classes": [0, 1]}, str(box.path("x").parent), "model"
    )
    box.attempt("cav", lambda: (vectors.create_cav_dir_if_missing(str(box.folder), "model"), vectors.save()))


@library("torchxrayvision")
def torchxrayvision(box: Box) -> None:
    """A densenet, whole."""
    from torchxrayvision.models import DenseNet

    model = DenseNet(growth_rate=4, block_config=(1, 1), num_init_features=8, num_classes=2)
    box.save("densenet.pt", model, model)
    box.save("densenet_state.pt", model.state_dict(), model)


@library("mmcv-lite")
def mmcv(box: Box) -> None:
    """Layers of OpenMMLab, and a checkpoint with its meta data."""
    from mmcv.cnn import ConvModule

    model = nn.Sequential(ConvModule(3, 4, 3, norm_cfg={"type": "BN"}), ConvModule(4, 4, 1))
    box.save("epoch.pth", {"meta": {"epoch": 1, "CLASSES": ("a", "b")}, "state_dict": model.state_dict()}, model)
    with box.path("result.pkl").open("wb") as file:
        pickle.dump([torch.ones(2, 5)], file)
