"""Libraries about speech and words, and Keras on torch."""

from __future__ import annotations

import torch

from tests.zoo.box import Box, Net, library, trained


@library("torchaudio")
def torchaudio(box: Box) -> None:
    """A model with weight norm."""
    from torchaudio import models

    model = models.ConvTasNet(num_sources=2, enc_kernel_size=4, enc_num_feats=4, msk_num_feats=4,
                              msk_num_hidden_feats=4, msk_num_layers=1, msk_num_stacks=1)  # fmt: skip
    box.save("tasnet.pt", model.state_dict(), model)
    waves = models.wav2vec2_model(
        extractor_mode="group_norm", extractor_conv_layer_config=[(4, 3, 2)], extractor_conv_bias=False,
        encoder_embed_dim=8, encoder_projection_dropout=0, encoder_pos_conv_kernel=4, encoder_pos_conv_groups=2,
        encoder_num_layers=1, encoder_num_heads=2, encoder_attention_dropout=0, encoder_ff_interm_features=8,
        encoder_ff_interm_dropout=0, encoder_dropout=0, encoder_layer_norm_first=False, encoder_layer_drop=0,
        aux_num_out=3,
    )  # fmt: skip
    box.save("wav2vec2.pt", waves.state_dict(), waves)


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


@library("flair")
def flair(box: Box) -> None:
    """save of a tagger: its embeddings and dictionaries are in the file."""
    from flair.data import Dictionary, Sentence
    from flair.embeddings import CharacterEmbeddings, OneHotEmbeddings
    from flair.models import SequenceTagger

    labels = Dictionary(add_unk=False)
    for label in ("A", "B"):
        labels.add_item(label)
    words = Dictionary()
    words.add_item("word")
    sentence = Sentence("word")
    assert sentence is not None
    tagger = SequenceTagger(
        OneHotEmbeddings(words, embedding_length=4), labels, "ner", hidden_size=4, tag_format="BIOES"
    )
    tagger.save(box.path("tagger.pt"))
    box.weights("tagger.pt", tagger.state_dict())
    letters = CharacterEmbeddings(char_embedding_dim=4, hidden_size_char=4)
    box.save("letters.pt", letters.state_dict(), letters)


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


@library("spacy")
def spacy(box: Box) -> None:
    """thinc's wrapper of a torch model: bytes of torch.save inside of msgpack."""
    from thinc.api import PyTorchWrapper

    model = PyTorchWrapper(Net())
    model.to_disk(box.path("model"))
    box.save("state.pt", torch.nn.Linear(2, 2).state_dict())
