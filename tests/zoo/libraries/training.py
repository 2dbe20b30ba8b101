"""Trainers, optimizers and wrappers: what is saved while a net is trained."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.box import Box, Net, library, step, trained


def _data(kind: str = "numbers") -> DataLoader[Any]:
    answers = torch.randn(8, 2) if kind == "numbers" else torch.randint(0, 2, (8,))
    return DataLoader(TensorDataset(torch.randn(8, 3), answers), batch_size=4)


@library("lightning")
def lightning(box: Box) -> None:
    """Checkpoints of the Trainer, with callbacks that average, and with hyperparameters."""
    import lightning as L
    from lightning.pytorch import callbacks

    class Task(L.LightningModule):
        def __init__(self, width: int = 4, rate: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Net(width)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return (self.net(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), self.hparams.rate)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    kinds: dict[str, list[Any]] = {
        "plain": [callbacks.ModelCheckpoint(box.folder / "kept", save_last=True)],
        "swa": [callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)],
        "ema": [callbacks.EMAWeightAveraging()] if hasattr(callbacks, "EMAWeightAveraging") else [],
    }
    for name, extra in kinds.items():
        task = Task()
        trainer = L.Trainer(max_epochs=3, callbacks=extra, enable_checkpointing=name == "plain", **quiet)
        trainer.fit(task, _data())
        trainer.save_checkpoint(box.path(f"{name}.ckpt"))
        trainer.save_checkpoint(box.path(f"{name}_weights.ckpt"), weights_only=True)
        if name == "plain":
            box.weights("plain.ckpt", task)
            box.weights("plain_weights.ckpt", task)
            box.attempt("script", lambda task=task: torch.jit.save(torch.jit.script(task.net), box.path("task.pt")))
    fabric = L.Fabric(accelerator="cpu")
    model, optimizer = fabric.setup(*trained())
    fabric.save(box.path("fabric.ckpt"), {"model": model, "optimizer": optimizer, "step": 3})
    box.weights("fabric.ckpt", model.module.state_dict())


@library("torchmetrics")
def torchmetrics(box: Box) -> None:
    """Metrics, whose states are lists and tensors."""
    import torchmetrics as tm

    metrics = tm.MetricCollection([tm.Accuracy("multiclass", num_classes=3), tm.F1Score("multiclass", num_classes=3)])
    metrics.persistent(True)
    metrics.update(torch.tensor([0, 1, 2]), torch.tensor([0, 2, 2]))
    box.save("collection.pt", metrics.state_dict())
    box.save("collection_whole.pt", metrics)
    lists = tm.AUROC("binary")
    lists.persistent(True)
    lists.update(torch.rand(4), torch.tensor([0, 1, 0, 1]))
    box.save("lists.pt", lists.state_dict())
    box.save("average.pt", tm.MeanMetric().state_dict())


@library("pytorch-ignite")
def ignite(box: Box) -> None:
    """Its Checkpoint handler, and EMAHandler."""
    from ignite.engine import Engine, Events, create_supervised_trainer
    from ignite.handlers import Checkpoint, DiskSaver, EMAHandler, ModelCheckpoint

    model, optimizer = trained()
    trainer: Engine = create_supervised_trainer(model, optimizer, nn.MSELoss())
    average = EMAHandler(model)
    average.attach(trainer)
    saver = DiskSaver(str(box.path("disk")), create_dir=True, require_empty=False)
    everything = {"model": model, "optimizer": optimizer, "trainer": trainer, "ema": average.ema_model}
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(everything, saver, n_saved=2))
    keeper = ModelCheckpoint(str(box.path("models")), "net", require_empty=False, create_dir=True)
    trainer.add_event_handler(Events.COMPLETED, keeper, {"net": model})
    trainer.run(_data(), max_epochs=2)
    for path in (box.folder / "models").glob("*.pt"):
        box.weights(path, model)
    for path in (box.folder / "disk").glob("*_4.pt"):
        box.weights(path, model, key="model")
        box.weights(path, average.ema_model.state_dict(), choice="ema")


@library("mmengine")
def mmengine(box: Box) -> None:
    """The checkpoints of its runner, and ExponentialMovingAverage."""
    from mmengine.model import BaseModel, ExponentialMovingAverage
    from mmengine.runner import save_checkpoint
    from mmengine.runner.checkpoint import get_state_dict, weights_to_cpu

    class Task(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, inputs: Any, mode: str = "tensor") -> Any:
            return self.net(inputs)

    model = Task()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step(model.net, optimizer)
    average = ExponentialMovingAverage(model)
    average.update_parameters(model)
    meta = {
        "epoch": 1,
        "iter": 8,
        "cfg": "a = 1",
        "seed": 0,
        "time": "20260101_000000",
        "dataset_meta": {"classes": ("a",)},
    }
    state = weights_to_cpu(get_state_dict(model))
    content = {
        "meta": meta,
        "state_dict": state,
        "message_hub": {"log_scalars": {}},
        "optimizer": optimizer.state_dict(),
    }
    save_checkpoint(content, str(box.path("epoch_1.pth")))
    box.weights("epoch_1.pth", model)
    save_checkpoint(content | {"ema_state_dict": average.state_dict()}, str(box.path("epoch_1_ema.pth")))
    box.weights("epoch_1_ema.pth", model, choice="raw")
    box.weights("epoch_1_ema.pth", average.module.state_dict(), choice="ema")


@library("opacus")
def opacus(box: Box) -> None:
    """Private training: a wrapped model, and the checkpoint of its engine."""
    from opacus import GradSampleModule, PrivacyEngine

    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    wrapped = GradSampleModule(copy.deepcopy(net))
    box.save("wrapped.pt", wrapped.state_dict())
    box.weights("wrapped.pt", wrapped._module.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    engine = PrivacyEngine()
    private, optimizer, data = engine.make_private(
        module=net, optimizer=optimizer, data_loader=_data(), noise_multiplier=1.0, max_grad_norm=1.0
    )
    for x, y in data:
        optimizer.zero_grad()
        (private(x) - y).square().mean().backward()
        optimizer.step()
    engine.save_checkpoint(path=box.path("engine.pt"), module=private, optimizer=optimizer)
    box.weights("engine.pt", private._module.state_dict())


@library("skorch")
def skorch(box: Box) -> None:
    """Parameters, checkpoints and pickles of a net."""
    import joblib
    from skorch import NeuralNetRegressor
    from skorch.callbacks import Checkpoint

    keeper = Checkpoint(dirname=str(box.path("kept")), f_pickle="net.pkl", monitor="train_loss_best")
    net = NeuralNetRegressor(Net, max_epochs=2, callbacks=[keeper], verbose=0, optimizer=torch.optim.Adam)
    net.fit(torch.randn(10, 3).numpy(), torch.randn(10, 2).numpy())
    net.save_params(
        f_params=box.path("params.pt"), f_optimizer=box.path("optimizer.pt"), f_criterion=box.path("loss.pt")
    )
    box.weights("params.pt", net.module_)
    net.save_params(f_params=box.path("params.safetensors"), use_safetensors=True)
    box.weights("params.safetensors", net.module_)
    with box.path("net.pkl").open("wb") as file:
        pickle.dump(net, file)
    joblib.dump(net, box.path("net.joblib"))
    for name in ("net.pkl", "net.joblib"):  # what it moves between devices is a pickle inside the pickle
        box.weights(name, net.module_, member="__cuda_dependent_attributes__")


@library("dill")
def dill(box: Box) -> None:
    """Models whose classes are in the file."""
    import dill as library_

    model, optimizer = trained()
    box.path("model.dill").write_bytes(library_.dumps(model))
    box.save("model.pt", {"model": model, "optimizer": optimizer.state_dict()}, pickle_module=library_)
    box.save("state.pt", model.state_dict(), model, pickle_module=library_)


@library("fairscale")
def fairscale(box: Box) -> None:
    """Checkpointed modules, a pipe, and layers that are split."""
    from fairscale.nn import FlattenParamsWrapper, checkpoint_wrapper

    model = checkpoint_wrapper(Net())
    box.save("checkpointed.pt", model.state_dict(), model)
    flat = FlattenParamsWrapper(Net())
    box.weights(box.save("flattened.pt", flat.state_dict()), flat.state_dict())
    box.save("flattened_flat.pt", flat.flat_state_dict())


@library("torchsnapshot")
def torchsnapshot(box: Box) -> None:
    """A snapshot: a folder with a manifest."""
    from torchsnapshot import Snapshot

    model, optimizer = trained()
    Snapshot.take(str(box.path("snapshot/x").parent), {"model": model, "optimizer": optimizer})
