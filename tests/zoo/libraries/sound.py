"""Libraries about speech and words, and Keras on torch."""

from __future__ import annotations

from tests.zoo.box import Box, library, trained


@library("speechbrain")
def speechbrain(box: Box) -> None:
    """The folders of its Checkpointer."""
    from speechbrain.utils.checkpoints import Checkpointer
    from speechbrain.utils.epoch_loop import EpochCounter

    model, optimizer = trained()
    parts = {"model": model, "opt": optimizer, "epoch": EpochCounter(3)}
    keeper = Checkpointer(str(box.path("save/x").parent), recoverables=parts)
    keeper.save_checkpoint(meta={"loss": 0.5})
    for path in (box.folder / "save").rglob("model.ckpt"):
        box.weights(path, model)
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    voice = ECAPA_TDNN(
        8, channels=[8, 8, 8, 8, 16], attention_channels=4, lin_neurons=4, res2net_scale=2, se_channels=4
    )
    box.save("ecapa.ckpt", voice.state_dict(), voice)


@library("stanza")
def stanza(box: Box) -> None:
    """A tagger's model, in the legacy stream that it asks for."""
    from stanza.models.common.char_model import CharacterLanguageModel

    words = {"_unit2id": {"a": 0, "b": 1}, "_id2unit": ["a", "b"], "lang": "en", "idx": 0, "cutoff": 0, "lower": False}
    model, optimizer = trained()
    content = {"vocab": words, "model": model.state_dict(), "config": {"lr": 0.1}, "optimizer": optimizer.state_dict()}
    box.save("tagger.pt", content, model, _use_new_zipfile_serialization=False)
    assert CharacterLanguageModel is not None


@library("encodec")
def encodec(box: Box) -> None:
    """Its encoder, with weight norm."""
    from encodec.modules import SEANetDecoder, SEANetEncoder

    for name, kind in {"encoder": SEANetEncoder, "decoder": SEANetDecoder}.items():
        model = kind(dimension=8, n_filters=2, ratios=[2, 2], lstm=1)
        box.save(f"{name}.th", {"best_state": model.state_dict()}, model)
        box.save(f"{name}_whole.th", model)


@library("openai-whisper")
def whisper(box: Box) -> None:
    """A checkpoint with its dimensions."""
    from whisper.model import ModelDimensions, Whisper

    sizes = ModelDimensions(8, 10, 16, 2, 1, 20, 8, 16, 2, 1)
    model = Whisper(sizes)
    box.save("tiny.pt", {"dims": vars(sizes), "model_state_dict": model.state_dict()}, model)
    box.save("half.pt", {"dims": vars(sizes), "model_state_dict": model.half().state_dict()}, model)


@library("keras")
def keras(box: Box) -> None:
    """Keras on torch: saved by torch, and by Keras."""
    import keras as library_

    model = library_.Sequential([library_.layers.Input((3,)), library_.layers.Dense(4), library_.layers.Dense(2)])
    box.save("state.pt", model.state_dict(), model)
    box.attempt("whole", lambda: box.save("whole.pt", model))
    model.save(box.path("model.keras"))
    model.save_weights(box.path("model.weights.h5"))
