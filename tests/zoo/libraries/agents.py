"""Libraries that learn to act."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.box import Box, Net, library, trained


@library("stable-baselines3")
def baselines(box: Box) -> None:
    """save of every algorithm: a zip with several checkpoints in it."""
    from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3

    small = {"net_arch": [4]}
    for kind in (A2C, PPO, DQN):
        box.attempt(
            kind.__name__, lambda kind=kind: _agent(box, kind("MlpPolicy", "CartPole-v1", policy_kwargs=dict(small)))
        )
    for kind in (SAC, TD3, DDPG):
        box.attempt(
            kind.__name__,
            lambda kind=kind: _agent(box, kind("MlpPolicy", "Pendulum-v1", policy_kwargs=dict(small), buffer_size=9)),
        )


def _agent(box: Box, agent: Any) -> None:
    name = type(agent).__name__.lower()
    agent.save(box.path(f"{name}.zip"))
    box.weights(f"{name}.zip", agent.policy)
    agent.policy.save(str(box.path(f"{name}_policy.pt")))
    box.weights(f"{name}_policy.pt", agent.policy)


@library("sb3-contrib")
def contrib(box: Box) -> None:
    """More algorithms."""
    from sb3_contrib import ARS, QRDQN, TQC, TRPO, RecurrentPPO

    box.attempt(
        "TQC", lambda: _agent(box, TQC("MlpPolicy", "Pendulum-v1", policy_kwargs={"net_arch": [4]}, buffer_size=9))
    )
    for kind in (TRPO, ARS):
        box.attempt(
            kind.__name__,
            lambda kind=kind: _agent(box, kind("MlpPolicy", "CartPole-v1", policy_kwargs={"net_arch": [4]})),
        )
    box.attempt(
        "QRDQN", lambda: _agent(box, QRDQN("MlpPolicy", "CartPole-v1", policy_kwargs={"net_arch": [4]}, buffer_size=9))
    )
    recurrent = {"net_arch": [4], "lstm_hidden_size": 4}
    box.attempt(
        "RecurrentPPO", lambda: _agent(box, RecurrentPPO("MlpLstmPolicy", "CartPole-v1", policy_kwargs=recurrent))
    )


@library("tensordict")
def tensordict(box: Box) -> None:
    """TensorDicts, modules around them, and memory maps."""
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictParams

    data = TensorDict({"a": torch.randn(3, 2), "b": {"c": torch.arange(3)}}, batch_size=[3])
    box.save("data.pt", data)
    box.save("state.pt", data.state_dict())
    data.memmap(str(box.path("mapped/x").parent))
    module = TensorDictModule(nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
    box.save("module.pt", module.state_dict(), module, wrapped=False)
    box.save("module_whole.pt", module, module, wrapped=False)
    parameters = TensorDictParams(TensorDict.from_module(Net()))
    box.weights(box.save("parameters.pt", parameters.state_dict()), dict(parameters.state_dict()), fill=False)


@library("torchrl")
def torchrl(box: Box) -> None:
    """A replay buffer, a loss with its target nets, and a policy."""
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.modules import MLP, QValueActor
    from torchrl.objectives import DQNLoss

    actor = QValueActor(MLP(3, 2, num_cells=[4]), in_keys=["observation"], spec=None, action_space="one_hot")
    box.save("actor.pt", actor.state_dict(), actor, wrapped=False)
    loss = DQNLoss(actor, action_space="one_hot", delay_value=True)
    box.weights(box.save("loss.pt", loss.state_dict()), dict(loss.state_dict()), fill=False)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(TensorDict({"observation": torch.randn(4, 3)}, batch_size=[4]))
    box.save("buffer.pt", buffer.state_dict())
    box.attempt("dumps", lambda: buffer.dumps(str(box.path("buffer/x").parent)))
    policy = TensorDictModule(MLP(3, 2, num_cells=[4]), in_keys=["observation"], out_keys=["action"])
    box.save("policy.pt", policy.state_dict(), policy, wrapped=False)


@library("tianshou")
def tianshou(box: Box) -> None:
    """Nets and policies."""
    from tianshou.utils.net.common import MLP

    net = MLP(input_dim=3, output_dim=2, hidden_sizes=[4])
    box.save("policy.pth", net.state_dict(), net)
    optimizer = torch.optim.Adam(net.parameters())
    box.save("checkpoint.pth", {"model": net.state_dict(), "optim": optimizer.state_dict()}, net)
    box.attempt("whole", lambda: box.save("policy_whole.pt", net, net))


@library("d3rlpy")
def d3rlpy(box: Box) -> None:
    """save and save_model of an algorithm."""
    import d3rlpy as library_
    import numpy as np

    algorithm = library_.algos.DQNConfig(encoder_factory=library_.models.VectorEncoderFactory([4])).create(device="cpu")
    data = library_.dataset.MDPDataset(
        np.random.rand(20, 3).astype("f4"),
        np.random.randint(0, 2, (20, 1)),
        np.random.rand(20, 1),
        np.arange(20) % 5 == 4,
    )
    algorithm.build_with_dataset(data)
    algorithm.save_model(str(box.path("model.pt")))
    algorithm.save(str(box.path("algorithm.d3")))


@library("skrl")
def skrl(box: Box) -> None:
    """A checkpoint of an agent: parts by name."""
    model, optimizer = trained()
    value, _ = trained()
    parts = {"policy": model.state_dict(), "value": value.state_dict(), "optimizer": optimizer.state_dict()}
    box.save("agent_10.pt", parts)
    box.weights("agent_10.pt", model, key="policy")
    box.weights("agent_10.pt", value, key="value")
    from skrl.resources.preprocessors.torch import RunningStandardScaler

    scaler = RunningStandardScaler(size=3)
    box.save("scaler.pt", scaler.state_dict(), scaler)
