"""Small libraries of many subjects: sound, series, tables, manifolds, spikes, masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.box import Box, library, step, trained


def _all_ways(box: Box, name: str, model: nn.Module, **options: Any) -> None:
    box.save(f"{name}.pt", model.state_dict(), model)
    optimizer = torch.optim.Adam(model.parameters(), **options) if list(model.parameters()) else None
    content = {"epoch": 1, "model_state_dict": model.state_dict()}
    box.save(f"{name}_checkpoint.pt", content | ({"optimizer": optimizer.state_dict()} if optimizer else {}), model)
    box.save(f"{name}_legacy.pt", model.state_dict(), model, _use_new_zipfile_serialization=False)
    box.attempt(f"{name}, whole", lambda: box.save(f"{name}_whole.pt", model, model))


def _known(cls: type[nn.Module]) -> type[nn.Module]:
    """Let pickle find a class that can be defined only when its library is imported."""
    cls.__qualname__ = cls.__name__
    globals()[cls.__name__] = cls
    return cls


@library("geoopt")
def geoopt(box: Box) -> None:
    """Parameters on manifolds, which are tensors of a class of their own, and optimizers that know them."""
    import geoopt as library_

    @_known
    class Curved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ball = library_.ManifoldParameter(torch.randn(4, 2) * 0.01, manifold=library_.PoincareBall(c=1.0))
            self.sphere = library_.ManifoldParameter(
                library_.Sphere().projx(torch.randn(3, 2)), manifold=library_.Sphere()
            )
            self.layer = nn.Linear(2, 2)

        def forward(self) -> torch.Tensor:
            found: torch.Tensor = self.layer(self.ball).sum() + self.sphere.sum()
            return found

    model = Curved()
    optimizer = library_.optim.RiemannianAdam(model.parameters(), lr=0.01)
    model().backward()
    optimizer.step()
    _all_ways(box, "curved", model)
    box.save("trained.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, model)
    box.save("objects.pt", {"model": model, "optimizer": optimizer}, model)
    box.save("parameter.pt", model.ball)
    box.save("tensor.pt", {"x": library_.ManifoldTensor(torch.randn(2, 3), manifold=library_.Euclidean())})


@library("pypose")
def pypose(box: Box) -> None:
    """Poses: tensors of a class of their own, as parameters and alone."""
    import pypose as library_

    @_known
    class Poses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pose = library_.Parameter(library_.randn_SE3(2))
            self.layer = nn.Linear(2, 2)

    _all_ways(box, "poses", Poses())
    box.save("pose.pt", library_.randn_SO3(3))
    box.save("several.pt", {"a": library_.randn_se3(2), "plain": torch.randn(2)})


@library("snntorch")
def snntorch(box: Box) -> None:
    """Neurons that spike, with buffers and learned thresholds."""
    import snntorch as library_
    from snntorch import surrogate

    net = nn.Sequential(
        nn.Linear(3, 4),
        library_.Leaky(beta=0.9, init_hidden=True, learn_beta=True, learn_threshold=True),
        nn.Linear(4, 2),
        library_.Synaptic(alpha=0.9, beta=0.8, init_hidden=True, output=True, spike_grad=surrogate.fast_sigmoid()),
    )
    net(torch.randn(2, 3))
    _all_ways(box, "net", net)
    _all_ways(box, "recurrent", library_.RLeaky(beta=0.5, linear_features=4))


@library("segment-anything")
def segment_anything(box: Box) -> None:
    """Sam, tiny, from its parts."""
    from segment_anything.modeling import ImageEncoderViT, MaskDecoder, PromptEncoder, Sam, TwoWayTransformer

    width = 8
    model = Sam(
        image_encoder=ImageEncoderViT(
            img_size=32, patch_size=16, embed_dim=8, depth=1, num_heads=2, out_chans=width, use_rel_pos=True
        ),
        prompt_encoder=PromptEncoder(
            embed_dim=width, image_embedding_size=(2, 2), input_image_size=(32, 32), mask_in_chans=4
        ),
        mask_decoder=MaskDecoder(
            transformer_dim=width, transformer=TwoWayTransformer(depth=1, embedding_dim=width, mlp_dim=8, num_heads=2)
        ),
    )
    _all_ways(box, "sam", model)


@library("nnAudio")
def nn_audio(box: Box) -> None:
    """Spectrograms as layers, whose kernels are buffers or are trained."""
    from nnAudio import features

    model = nn.Sequential(
        features.STFT(n_fft=64, hop_length=32, trainable=True, verbose=False),
        features.MelSpectrogram(sr=8000, n_fft=64, n_mels=4, hop_length=32, trainable_mel=True, verbose=False),
        features.CQT1992v2(sr=8000, fmin=500, n_bins=6, hop_length=32, verbose=False),
    )
    _all_ways(box, "spectrograms", model)


@library("rtdl-revisiting-models")
def rtdl(box: Box) -> None:
    """Transformers for tables."""
    from rtdl_revisiting_models import MLP, FTTransformer, ResNet

    blocks = {**FTTransformer.get_default_kwargs(1), "d_block": 8, "attention_n_heads": 2}
    _all_ways(box, "mlp", MLP(d_in=3, d_out=2, n_blocks=1, d_block=4, dropout=0.1))
    residual = ResNet(d_in=3, d_out=2, n_blocks=1, d_block=4, d_hidden=None, d_hidden_multiplier=2.0,
                      dropout1=0.1, dropout2=0.0)  # fmt: skip
    _all_ways(box, "resnet", residual)
    model = FTTransformer(n_cont_features=2, cat_cardinalities=[3, 4], d_out=1, **blocks)
    _all_ways(box, "transformer", model)
    groups = torch.optim.AdamW(model.make_parameter_groups())
    box.save("groups.pt", {"model": model.state_dict(), "optimizer": groups.state_dict()}, model)


@library("gluonts")
def gluonts(box: Box) -> None:
    """A predictor as it is serialised, in a folder, and the checkpoint of its training."""
    import numpy as np
    from gluonts.dataset.common import ListDataset
    from gluonts.torch import DeepAREstimator

    data = ListDataset([{"start": "2020-01-01", "target": np.arange(60.0)}], freq="D")
    options = {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False,
               "default_root_dir": str(box.path("logs/x").parent)}  # fmt: skip
    estimator = DeepAREstimator(
        freq="D", prediction_length=3, hidden_size=4, num_layers=1, batch_size=4, num_batches_per_epoch=2,
        trainer_kwargs=options,
    )  # fmt: skip
    found = estimator.train_model(data)
    folder = box.path("predictor/x").parent
    found.predictor.serialize(folder)
    for path in folder.rglob("*state*.pt"):
        box.weights(path, found.predictor.prediction_net)
    for path in (box.folder / "logs").rglob("*.ckpt"):
        box.weights(path, found.trained_net)


@library("torch: averages")
def lightning_averages(box: Box) -> None:
    """Averages of several kinds, as loops of one's own keep them."""
    from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

    model, optimizer = trained()
    twins = {
        "swa": AveragedModel(model),
        "ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
        "of_wrapped": AveragedModel(nn.DataParallel(model)),
    }
    scheduler = SWALR(optimizer, swa_lr=0.1)
    for name, twin in twins.items():
        step(model, optimizer)
        twin.update_parameters(model if name != "of_wrapped" else nn.DataParallel(model))
        scheduler.step()
        plain = {key.removeprefix("module.").removeprefix("module."): value for key, value in
                 twin.state_dict().items() if key != "n_averaged"}  # fmt: skip
        box.weights(box.save(f"{name}.pt", twin.state_dict()), plain)
        box.weights(f"{name}.pt", plain, choice="ema")
        content = {"model": model.state_dict(), "ema_state": twin.state_dict(), "scheduler": scheduler.state_dict()}
        box.save(f"{name}_beside.pt", content, model)
        box.weights(f"{name}_beside.pt", plain, choice="ema")
        box.attempt(name, lambda name=name, twin=twin: box.save(f"{name}_whole.pt", twin))
    box.weights("swa_whole.pt", {k.removeprefix("module."): v for k, v in twins["swa"].module.state_dict().items()})
