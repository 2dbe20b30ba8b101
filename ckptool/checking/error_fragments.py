"""What people quote of an error message when they do not quote all of it: the words by which it is known."""

from __future__ import annotations

from ckptool.checking.error_messages import TO_CPU, Entry

FRAGMENTS: tuple[Entry, ...] = (
    Entry(
        "some-device",
        r"(?i)deserialize object on|cuda\.is_available\(\) is False",
        "The tensors were saved on a device that is not here.",
        f"{TO_CPU}; why there is none: ckptool devices",
    ),
    Entry(
        "some-class",
        r"Can't get attribute|No module named",
        "The file holds a whole model, and its class cannot be imported here.",
        "Take the weights without it: ckptool migrate FILE --form state_dict",
    ),
    Entry(
        "some-keys",
        r"(?i)(?:missing|unexpected) keys?\b",
        "The names in the file are not those of the model.",
        "Hold the file against the class: ckptool check FILE --model package.module:Class",
    ),
    Entry(
        "some-shape",
        r"size mismatch for ([\w.]+)",
        "{0} has another shape in the file than in the model: the model was built with other sizes.",
        "See both: ckptool check FILE --model package.module:Class --model-arg NAME=VALUE",
    ),
    Entry(
        "some-damage",
        r"PytorchStreamReader|central directory|unexpected EOF|archive is corrupted",
        "The file is damaged, cut short, or no checkpoint.",
        "See which: ckptool check FILE --deep",
    ),
    Entry(
        "some-memory",
        r"(?i)out of memory|^\W*killed\W*$|cannot allocate memory",
        "Loading needed more memory than there was: torch.load() needs the file's size, and the model's again.",
        "Load with ckptool.load_into(model, FILE), which never has two copies, or halve it: "
        "ckptool migrate FILE --dtype bfloat16",
    ),
)
"""Asked last, and in this order."""
