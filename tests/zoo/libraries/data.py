"""Libraries about series, graphs of facts, cells, and autoencoders."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from tests.zoo.box import Box, library


@library("darts")
def darts(box: Box) -> None:
    """Forecasting models: a pickle of all but the net, and a checkpoint of Lightning beside it."""
    from darts import TimeSeries
    from darts.models import NBEATSModel, TCNModel

    series = TimeSeries.from_values(np.sin(np.arange(40, dtype="float32")))
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False, "enable_model_summary": False}
    common: dict[str, Any] = {"n_epochs": 1, "batch_size": 8, "pl_trainer_kwargs": quiet}
    common |= {"input_chunk_length": 6, "output_chunk_length": 2}
    nbeats = NBEATSModel(num_stacks=2, num_blocks=1, num_layers=1, layer_widths=4, **common)
    tcn = TCNModel(num_filters=2, kernel_size=2, save_checkpoints=True, work_dir=str(box.path("work")), **common)
    for name, model in (("nbeats", nbeats), ("tcn", tcn)):
        model.fit(series)
        model.save(str(box.path(f"{name}.pt")))
        box.weights(f"{name}.pt.ckpt", model.model)
        box.save(f"{name}_weights.pt", model.model.state_dict(), model.model)


@library("pykeen")
def pykeen(box: Box) -> None:
    """Embeddings of a graph: the folder of a pipeline's result, and a checkpoint of the training loop."""
    from pykeen.pipeline import pipeline

    loop = {"num_epochs": 2, "checkpoint_directory": str(box.path("loop/x").parent), "checkpoint_name": "loop.pt"}
    loop["checkpoint_frequency"] = 0
    for name, kind in (("transe", "TransE"), ("conve", "RotatE")):
        result = pipeline(
            dataset="nations",
            model=kind,
            model_kwargs={"embedding_dim": 4},
            training_kwargs={"num_epochs": 1, "use_tqdm": False} | (loop if name == "transe" else {}),
            evaluation_kwargs={"use_tqdm": False},
            random_seed=0,
            device="cpu",
        )
        result.save_to_directory(box.path(f"{name}/x").parent)
        box.weights(f"{name}/trained_model.pkl", result.model)
        box.save(f"{name}.pt", result.model.state_dict(), result.model)


@library("pythae")
def pythae(box: Box) -> None:
    """Autoencoders: their folders, with one encoder of ours, which is pickled by value, and those of the trainer."""
    from pythae.models import AE, VAE, AEConfig, VAEConfig
    from pythae.models.base.base_utils import ModelOutput
    from pythae.models.nn import BaseEncoder
    from pythae.trainers import BaseTrainer, BaseTrainerConfig

    class Encoder(BaseEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.latent_dim = 2
            self.layer = torch.nn.Linear(9, 2)

        def forward(self, x: torch.Tensor) -> ModelOutput:
            return ModelOutput(embedding=self.layer(x.flatten(1)))

    plain = VAE(VAEConfig(input_dim=(1, 3, 3), latent_dim=2))
    own = AE(AEConfig(input_dim=(1, 3, 3), latent_dim=2), encoder=Encoder())
    for name, model in (("vae", plain), ("own", own)):
        model.save(str(box.path(f"{name}/x").parent))
        box.weights(f"{name}/model.pt", model)
    config = BaseTrainerConfig(str(box.path("training/x").parent), num_epochs=2, steps_saving=1, no_cuda=True)
    trainer = BaseTrainer(plain, train_dataset=_examples(), training_config=config)
    box.attempt("training", trainer.train)
    box.weights(next((box.folder / "training").rglob("final_model/model.pt")), trainer._best_model)


def _examples() -> Any:
    from pythae.data.datasets import BaseDataset

    return BaseDataset(torch.rand(8, 1, 3, 3), torch.zeros(8))


@library("scvi-tools")
def scvi_tools(box: Box) -> None:
    """A model of single cells: one file with weights, names of genes, and a registry of what was trained on."""
    import anndata
    import scvi

    warnings.simplefilter("ignore")
    cells = anndata.AnnData(np.random.default_rng(0).poisson(2.0, (20, 6)).astype("float32"))
    cells.obs["batch"] = ["a", "b"] * 10
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells, n_hidden=4, n_latent=2, n_layers=1)
    model.train(max_epochs=1, accelerator="cpu", batch_size=10, enable_progress_bar=False, logger=False)
    for name, options in (("alone", {}), ("with_cells", {"save_anndata": True})):
        folder = box.path(f"{name}/x").parent
        model.save(str(folder), overwrite=True, **options)
        box.weights(f"{name}/model.pt", model.module)
    optimizer_too = box.path("with_optimizer/x").parent
    box.attempt("optimizer", lambda: model.save(str(optimizer_too), overwrite=True, save_kwargs={"pickle_protocol": 4}))


@library("neuralforecast")
def neuralforecast(box: Box) -> None:
    """The folder of several forecasters."""
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    frame = pd.DataFrame({"unique_id": "a", "ds": np.arange(40), "y": np.random.rand(40)})
    model = NHITS(h=2, input_size=4, max_steps=2, mlp_units=[[4, 4]] * 3, enable_progress_bar=False, logger=False)
    several = NeuralForecast([model], freq=1)
    several.fit(frame)
    several.save(str(box.path("saved/x").parent), overwrite=True)
    for path in (box.folder / "saved").glob("*.ckpt"):
        box.weights(path, several.models[0].state_dict())
