"""Libraries about graphs, atoms, probabilities, tables and series."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import nn

from tests.zoo.box import Box, library


def _both(box: Box, name: str, model: nn.Module) -> None:
    box.save(f"{name}.pt", model.state_dict(), model)
    optimizer = torch.optim.Adam(model.parameters())
    content = {"epoch": 1, "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    box.save(f"{name}_checkpoint.pt", content, model)
    box.attempt(f"{name}, whole", lambda: box.save(f"{name}_whole.pt", model, model))


@library("torch-geometric")
def torch_geometric(box: Box) -> None:
    """Models with lazy layers, and graphs."""
    import torch_geometric.nn as gnn
    from torch_geometric.data import Data, HeteroData

    _both(box, "gcn", gnn.GCN(3, 4, 2, 2))
    _both(box, "gat", gnn.GAT(3, 4, 2, 2))
    lazy = gnn.SAGEConv((-1, -1), 4)
    box.save("lazy_empty.pt", lazy.state_dict())
    graph = Data(x=torch.randn(4, 3), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]), y=torch.ones(1))
    lazy(graph.x, graph.edge_index)
    _both(box, "lazy", lazy)
    typed = HeteroData()
    typed["a"].x = torch.randn(2, 3)
    typed["a", "to", "a"].edge_index = torch.tensor([[0], [1]])
    hetero = gnn.HeteroConv({("a", "to", "a"): gnn.SAGEConv((3, 3), 4)})
    box.save("hetero.pt", hetero.state_dict(), hetero)
    box.save("graph.pt", graph)
    box.save("graphs.pt", [graph, graph.clone()])
    box.save("typed.pt", typed)


@library("e3nn")
def e3nn(box: Box) -> None:
    """Compiled tensor products."""
    torch.serialization.add_safe_globals([slice])  # for a file of its own
    from e3nn import o3
    from e3nn.nn import FullyConnectedNet

    product = o3.FullyConnectedTensorProduct("2x0e + 1x1o", "1x0e + 1x1o", "2x0e + 1x1o")
    _both(box, "product", product)
    _both(box, "linear", o3.Linear("2x0e + 1x1o", "3x0e + 1x1o"))
    _both(box, "net", FullyConnectedNet([3, 4, 2], torch.nn.functional.silu))


@library("gpytorch")
def gpytorch(box: Box) -> None:
    """An exact process with constraints and priors."""
    import gpytorch as library_

    class Process(library_.models.ExactGP):
        def __init__(self, x: Any, y: Any, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = library_.means.ConstantMean()
            self.covar_module = library_.kernels.ScaleKernel(
                library_.kernels.RBFKernel(lengthscale_prior=library_.priors.GammaPriorFix(3.0, 6.0))
                if hasattr(library_.priors, "GammaPriorFix")
                else library_.kernels.RBFKernel(lengthscale_prior=library_.priors.GammaPrior(3.0, 6.0))
            )

    likelihood = library_.likelihoods.GaussianLikelihood()
    model = Process(torch.randn(4, 2), torch.randn(4), likelihood)
    box.save("exact.pt", model.state_dict(), model)
    box.save("likelihood.pt", likelihood.state_dict(), likelihood)
    box.save("both.pt", {"model": model.state_dict(), "likelihood": likelihood.state_dict()})
    box.weights("both.pt", model, key="model")


@library("botorch")
def botorch(box: Box) -> None:
    """Processes that optimise."""
    from botorch.models import MixedSingleTaskGP, SingleTaskGP

    x, y = torch.rand(5, 2, dtype=torch.float64), torch.rand(5, 1, dtype=torch.float64)
    _both(box, "single", SingleTaskGP(x, y))
    mixed = MixedSingleTaskGP(x, y, cat_dims=[1])
    box.save("mixed.pt", mixed.state_dict(), mixed)


@library("pytorch-tabnet")
def tabnet(box: Box) -> None:
    """save_model: a zip of its own."""
    from pytorch_tabnet.tab_model import TabNetClassifier
    from pytorch_tabnet.tab_network import TabNet

    table = TabNetClassifier(n_d=4, n_a=4, n_steps=1, verbose=0)
    table.fit(
        torch.randn(20, 3).numpy(),
        torch.randint(0, 2, (20,)).numpy(),
        max_epochs=1,
        batch_size=10,
        virtual_batch_size=5,
    )
    table.save_model(str(box.path("saved")))
    net = TabNet(3, 2, n_d=4, n_a=4, n_steps=1, group_attention_matrix=torch.eye(3))
    box.save("net.pt", net.state_dict(), net)
    with box.path("pickled.pkl").open("wb") as file:
        pickle.dump(table, file)


@library("pytorch-forecasting")
def forecasting(box: Box) -> None:
    """Lightning's checkpoints with data frames and normalisers in them."""
    import lightning.pytorch as pl
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import NBeats, TemporalFusionTransformer, TimeSeriesDataSet

    frame = pd.DataFrame(
        {"time": np.tile(np.arange(20), 2), "value": np.random.rand(40), "group": np.repeat(["a", "b"], 20)}
    )
    options: dict[str, Any] = {
        "time_idx": "time", "target": "value", "group_ids": ["group"], "time_varying_unknown_reals": ["value"],
        "max_encoder_length": 6, "max_prediction_length": 2, "min_encoder_length": 6, "min_prediction_length": 2,
    }  # fmt: skip
    data = TimeSeriesDataSet(frame, **options)
    models = {
        "nbeats": NBeats.from_dataset(data, widths=[8, 8], num_blocks=[1, 1]),
        "tft": TemporalFusionTransformer.from_dataset(data, hidden_size=4, attention_head_size=1),
    }
    for name, model in models.items():
        trainer = pl.Trainer(
            max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False, accelerator="cpu"
        )
        trainer.fit(model, data.to_dataloader(batch_size=8))
        trainer.save_checkpoint(box.path(f"{name}.ckpt"))
        box.weights(f"{name}.ckpt", model)
    data.save(str(box.path("data.pkl")))


@library("pyro-ppl")
def pyro(box: Box) -> None:
    """The store of parameters, and modules."""
    import pyro as library_
    from pyro import distributions as dist
    from pyro.contrib.gp.models import GPRegression
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoNormal

    def model(x: torch.Tensor) -> None:
        weight = library_.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        library_.sample("y", dist.Normal(x @ weight, 1.0).to_event(1), obs=torch.zeros(4))

    guide = AutoNormal(model)
    optimizer = library_.optim.Adam({"lr": 0.1})
    SVI(model, guide, optimizer, Trace_ELBO()).step(torch.randn(4, 3))
    library_.get_param_store().save(str(box.path("store.pt")))
    optimizer.save(str(box.path("optimizer.pt")))
    box.save("guide.pt", guide.state_dict(), guide)
    process = GPRegression(torch.randn(4, 1), torch.randn(4), library_.contrib.gp.kernels.RBF(1))
    box.weights(box.save("process.pt", process.state_dict()), process.state_dict())


@library("torchdiffeq")
def torchdiffeq(box: Box) -> None:
    """A net that is integrated."""
    from torchdiffeq import odeint_adjoint

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

        def forward(self, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            moved: torch.Tensor = self.net(x)
            return moved

    model = Flow()
    odeint_adjoint(model, torch.ones(2), torch.linspace(0, 1, 3)).sum().backward()
    _both(box, "flow", model)


@library("zuko")
def zuko(box: Box) -> None:
    """Flows."""
    from zuko import flows

    _both(box, "nsf", flows.NSF(2, 1, transforms=1, hidden_features=[4]))
    _both(box, "maf", flows.MAF(2, 1, transforms=1, hidden_features=[4]))


@library("nflows")
def nflows(box: Box) -> None:
    """Flows, older."""
    from nflows.distributions.normal import StandardNormal
    from nflows.flows.base import Flow
    from nflows.transforms.autoregressive import MaskedAffineAutoregressiveTransform
    from nflows.transforms.base import CompositeTransform
    from nflows.transforms.permutations import ReversePermutation

    parts = [ReversePermutation(2), MaskedAffineAutoregressiveTransform(2, 4)]
    _both(box, "maf", Flow(CompositeTransform(parts), StandardNormal([2])))


@library("sbi")
def sbi(box: Box) -> None:
    """A posterior, whole."""
    from sbi.inference import NPE
    from sbi.utils import BoxUniform

    prior = BoxUniform(torch.zeros(2), torch.ones(2))
    inference = NPE(prior, show_progress_bars=False)
    theta = prior.sample((40,))
    density = inference.append_simulations(theta, theta + 0.1).train(max_num_epochs=1)
    box.save("density.pt", density.state_dict(), density)
    box.save("density_whole.pt", density, density)
    with box.path("posterior.pkl").open("wb") as file:
        pickle.dump(inference.build_posterior(density), file)


@library("torchani")
def torchani(box: Box) -> None:
    """Nets for atoms."""
    from torchani.aev import AEVComputer

    net = nn.ModuleDict({symbol: nn.Sequential(nn.Linear(4, 2), nn.CELU(0.1), nn.Linear(2, 1)) for symbol in "HCNO"})
    _both(box, "atoms", net)
    box.attempt("aev", lambda: box.save("aev.pt", AEVComputer.like_2x().state_dict()))


@library("chgnet")
def chgnet(box: Box) -> None:
    """A model with its arguments, and the weights that the package has in it."""
    from chgnet.model import CHGNet

    model = CHGNet(atom_fea_dim=4, bond_fea_dim=4, angle_fea_dim=4, num_radial=3, num_angular=3, n_conv=2,
                   atom_conv_hidden_dim=4, bond_conv_hidden_dim=4, mlp_hidden_dims=4)  # fmt: skip
    content = {"model": model.as_dict(), "trainer_args": {}, "optimizer": None}
    box.save("epoch1.pth.tar", content, model)
    box.save("whole.pt", model, model)


@library("mace-torch")
def mace(box: Box) -> None:
    """Blocks of an equivariant model, whole and as state dict."""
    torch.serialization.add_safe_globals([slice])  # for a file of e3nn
    from e3nn import o3
    from mace.modules import LinearNodeEmbeddingBlock, LinearReadoutBlock, RadialEmbeddingBlock

    made = {
        "embedding": LinearNodeEmbeddingBlock(o3.Irreps("2x0e"), o3.Irreps("4x0e")),
        "radial": RadialEmbeddingBlock(5.0, 4, 5),
        "readout": LinearReadoutBlock(o3.Irreps("4x0e")),
    }
    for name, model in made.items():
        _both(box, name, model)


@library("neuraloperator")
def neuraloperator(box: Box) -> None:
    """save_checkpoint of an operator, with complex weights."""
    from neuralop.models import FNO
    from neuralop.training import save_training_state

    model = FNO(n_modes=(4, 4), hidden_channels=4, in_channels=1, out_channels=1, n_layers=1)
    model.save_checkpoint(str(box.path("x").parent), "fno")
    box.weights("fno_state_dict.pt", {key: one for key, one in model.state_dict().items() if key != "_metadata"})
    optimizer = torch.optim.Adam(model.parameters())
    box.attempt("training state", lambda: save_training_state(box.path("state/x").parent, "model", model, optimizer))
    factorised = FNO(
        n_modes=(4, 4), hidden_channels=4, in_channels=1, out_channels=1, n_layers=1, factorization="tucker", rank=0.5
    )
    box.weights(box.save("tucker.pt", factorised.state_dict()), factorised.state_dict())


@library("pytorch-widedeep")
def widedeep(box: Box) -> None:
    """Wide and deep parts."""
    from pytorch_widedeep.models import TabMlp, Wide, WideDeep

    deep = TabMlp({"a": 0, "b": 1}, cat_embed_input=[("a", 4, 2)], continuous_cols=["b"], mlp_hidden_dims=[4, 2])
    _both(box, "model", WideDeep(wide=Wide(10, 1), deeptabular=deep))


@library("deepxde")
def deepxde(box: Box) -> None:
    """Model.save."""
    import os

    os.environ["DDE_BACKEND"] = "pytorch"
    import deepxde as dde

    net = dde.nn.FNN([1, 4, 1], "tanh", "Glorot uniform")
    data = dde.data.TimePDE if False else dde.data.Function(dde.geometry.Interval(0, 1), lambda x: x, 4, 4)
    model = dde.Model(data, net)
    model.compile("adam", lr=0.01, verbose=0)
    model.train(iterations=2, verbose=0)
    path = model.save(str(box.path("model")))
    box.weights(path, net) if isinstance(path, str) else None


@library("tabpfn")
def tabpfn(box: Box) -> None:
    """A tiny model of its second architecture, as its checkpoints hold it, and its own way to safetensors."""
    from dataclasses import asdict

    from tabpfn.architectures import tabpfn_v2
    from tabpfn.checkpoint import save_as_safetensors

    config = tabpfn_v2.TabPFNV2Config(emsize=8, nlayers=1, nhead=2, max_num_classes=2)
    model = tabpfn_v2.get_architecture(config)
    content = {"state_dict": model.state_dict(), "config": asdict(config), "architecture_name": "tabpfn_v2"}
    box.save("model.ckpt", content, model)
    save_as_safetensors(content, box.path("model.safetensors"))
    box.weights("model.safetensors", model)
    _both(box, "net", model)
