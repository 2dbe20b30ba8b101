"""Mutants that no test could tell from the code: why, for each."""

from __future__ import annotations

ONLY_FASTER = "two ways to one result, of which the faster is chosen"
ONLY_SMALLER = "a buffer that is as large as what goes into it, and no larger"
NEVER_LONGER = "a slice is never longer than what was asked for"
LOOKED_AT_AGAIN = "the block is fetched again, or the member read the careful way: with the same result"
BOUNDED_ELSEWHERE = "what is looked for there is held against its room once more"
NEVER_BEYOND = "checked before: the left side is never the larger one"
NEITHER_SIDE = "it is none of the opcodes on either side"
ALONE_FILLS_IT = "a box without dimensions fills its tensor alone, which was seen before"
EMPTY_ANYWAY = "where they are equal, what follows does nothing"

OTHER_PYTHONS = "which Python it is: each runs one side alone"

EQUIVALENT: dict[tuple[str, str, str, str], str] = {
    (
        "checkpoints/contents",
        "_add_tensors",
        "longest <= self._limits.name_nbytes",
        "longest < self._limits.name_nbytes",
    ): (ONLY_FASTER),
    ("checkpoints/contents", "_add_tensors", "cost <= self._paths_nbytes", "cost < self._paths_nbytes"): ONLY_FASTER,
    (
        "checkpoints/contents",
        "_add_tensors",
        "len(tensors) + len(names) <= self._limits.tensors",
        "len(tensors) + len(names) < self._limits.tensors",
    ): ONLY_FASTER,
    ("checkpoints/contents", "_add_tensors", "len(set(names)) == len(names)", "len(set(names)) >= len(names)"): (
        "no set of names has more than there are"
    ),
    ("checkpoints/contents", "_mark_holding", "depth + _SMALL_DEPTH < deepest", "depth + _SMALL_DEPTH <= deepest"): (
        "what is small has fewer levels than that"
    ),
    ("formats/safetensors", "_layout", "len(entry) > len(_FIELDS)", "len(entry) >= len(_FIELDS)"): ONLY_FASTER,
    ("archives/compressed", "decompress", "len(self._head) < _ZIP_LZMA", "len(self._head) <= _ZIP_LZMA"): (
        "data that ends there holds nothing either way"
    ),
    ("pickles/reader", "_loop", "following >= 0", "following > 0"): ONLY_FASTER,
    ("pickles/reader", "_loop", "following >= 0", "following >= 1"): ONLY_FASTER,
    ("sources/files", "", "sys.version_info >= (3, 13)", "sys.version_info > (3, 13)"): OTHER_PYTHONS,
    ("sources/files", "", "sys.version_info >= (3, 13)", "sys.version_info < (3, 13)"): OTHER_PYTHONS,
    (
        "archives/archive",
        "_inflated",
        "position < record.stored_nbytes",
        "position <= record.stored_nbytes",
    ): EMPTY_ANYWAY,
    (
        "archives/archive",
        "_inflated",
        "position == record.stored_nbytes",
        "position >= record.stored_nbytes",
    ): NEVER_BEYOND,
    ("sources/checksums", "_checksum_ahead", "stop - start <= ReadAhead.BLOCK", "stop - start < ReadAhead.BLOCK"): (
        "one block is also a row of one block"
    ),
    ("checkpoints/contents", "_open", "len(tensors) < len(below)", "len(tensors) <= len(below)"): (
        "where all are tensors, the loop adds each of them, too"
    ),
    (
        "checkpoints/contents",
        "_group",
        "len(texts) == len(below)",
        "len(texts) >= len(below)",
    ): "the keys are some of those below",
    ("formats/safetensors", "read", "begin < position", "begin <= position"): "they differ there",
    ("formats/strict_json", "unique", "len(found) != len(pairs)", "len(found) < len(pairs)"): NEVER_BEYOND,
    ("formats/torch_legacy", "read", "min(48, rest)", "min(49, rest)"): "no more than 48 of them are looked at",
    ("formats/torch_legacy", "_walk_storages", "len(names) != len(announced)", "len(names) > len(announced)"): (
        "fewer names cannot be the same set"
    ),
    ("formats/plain_pickle", "sniff", "pickled.end == probe.source.nbytes", "pickled.end >= probe.source.nbytes"): (
        NEVER_BEYOND
    ),
    ("formats/pt2", "_read_configs", "len(configs) == 1", "len(configs) <= 1"): "without any there is nothing to name",
    (
        "formats/torch_zip",
        "read_archive",
        "pickled.end != archive[f'{root}data.pkl'].nbytes",
        "pickled.end < archive[f'{root}data.pkl'].nbytes",
    ): NEVER_BEYOND,
    ("formats/torch_zip", "_announced_nbytes", "min(30, source.nbytes)", "min(31, source.nbytes)"): (
        "no more than 30 of them are looked at"
    ),
    ("formats/torch_zip", "_announced_nbytes", "len(header) < 30", "len(header) < 29"): (
        "no pickle stands behind 29 bytes"
    ),
    ("pickles/machine", "lines", "end < 0", "end <= 0"): "a line does not end in front of its opcode",
    ("pickles/machine", "lines", "end < 0", "end < 1"): "a line does not end in front of its opcode",
    ("pickles/machine", "lines", "min(whole, 2 * len(self.data))", "min(whole, 3 * len(self.data))"): ONLY_FASTER,
    (
        "pickles/machine",
        "is_at_window_end",
        "self.pos + _LONGEST_FIXED > window",
        "self.pos + _LONGEST_FIXED >= window",
    ): ("the window is moved one opcode sooner"),
    ("pickles/reader", "_loop", "op >= 104", "op >= 103"): NEITHER_SIDE,
    ("pickles/reader", "_loop", "op >= 128", "op > 128"): NEITHER_SIDE,
    ("pickles/reader", "_loop", "op >= 128", "op >= 129"): NEITHER_SIDE,
    ("pickles/reader", "_loop", "op >= 128", "op >= 127"): NEITHER_SIDE,
    (
        "tensors/storage_ids",
        "storage_id",
        "len(pid) == 5",
        "len(pid) <= 5",
    ): "it has five, or more: a slice of five is itself",
    (
        "tensors/storage_ids",
        "storage_id",
        "len(pid) == 5",
        "len(pid) == 4",
    ): "it has five, or more: a slice of five is itself",
    (
        "tensors/storage_ids",
        "storage_id",
        "len(key) + len(location) > _SHORT",
        "len(key) + len(location) >= _SHORT",
    ): ONLY_FASTER,
    ("tensors/rebuild", "sparse", "len(parts) != len(fields)", "len(parts) < len(fields)"): NEVER_BEYOND,
    ("archives/tars", "_pax", "stop <= position + len(length)", "stop < position + len(length)"): (
        "a length that ends with itself ends with a digit, and not with a line"
    ),
    ("tensors/tensor", "is_contiguous", "size != 1", "size > 1"): "without elements the answer is the same",
    ("tensors/tensor", "is_contiguous", "self.numel == 0", "self.numel <= 0"): "no size is negative",
    ("tensors/reading", "_read_elements", "info.numel == 0", "info.numel <= 0"): "no size is negative",
    ("tensors/reading", "_read_elements", "scale > 1", "scale >= 1"): "a dimension of one element is dropped again",
    ("tensors/reading", "_read_elements", "scale > 1", "scale > 0"): "a dimension of one element is dropped again",
    ("tensors/tensor", "check_extent", "rank > 4", "rank > 3"): ONLY_FASTER,
    ("tensors/tensor", "check_extent", "rank > 4", "rank >= 4"): ONLY_FASTER,
    ("tensors/tensor", "known_crc32", "self.nbytes == storage.nbytes", "self.nbytes >= storage.nbytes"): NEVER_BEYOND,
    ("tensors/reading", "gather", "len(dims) == 1", "len(dims) <= 1"): "without dimensions it returned before",
    ("tensors/reading", "gather", "len(dims) == 1", "len(dims) == 0"): ONLY_FASTER,
    ("tensors/reading", "_pack", "len(dims) == 2", "len(dims) <= 2"): "a single run does not come there",
    ("tensors/reading", "_pack", "len(dims) == 2", "len(dims) == 1"): ONLY_FASTER,
    ("tensors/reading", "_pack", "dims[0][0] >= _LONG", "dims[0][0] > _LONG"): ONLY_FASTER,
    ("tensors/reading", "_pack", "dims[0][0] >= _LONG", "dims[0][0] < _LONG"): ONLY_FASTER,
    ("tensors/reading", "_pack", "dims[1][0] >= _WIDE", "dims[1][0] > _WIDE"): ONLY_FASTER,
    ("tensors/reading", "_pack", "dims[1][0] >= _WIDE", "dims[1][0] < _WIDE"): ONLY_FASTER,
    ("tensors/reading", "_pack", "dims[-1][0] >= _WIDE", "dims[-1][0] > _WIDE"): ONLY_FASTER,
    ("tensors/reading", "_pack", "dims[-1][0] >= _WIDE", "dims[-1][0] < _WIDE"): ONLY_FASTER,
    (
        "tensors/reading",
        "_pack_columns",
        "min(columns, _BLOCK_COLUMNS)",
        "min(_BLOCK_COLUMNS, _BLOCK_COLUMNS)",
    ): ONLY_SMALLER,
    ("tensors/reading", "_pack_columns", "min(columns, _BLOCK_COLUMNS)", "min(columns, columns)"): ONLY_SMALLER,
    ("tensors/reading", "_merge", "size == 1", "size <= 1"): "a tensor without elements does not come there",
    ("tensors/reading", "_merge", "size == 1", "size == 0"): "a dimension of one element may also stay",
    ("tensors/reading", "_pack", "dims[longest][0] >= _LONG", "dims[longest][0] > _LONG"): ONLY_FASTER,
    ("tensors/reading", "_pack", "dims[longest][0] >= _LONG", "dims[longest][0] < _LONG"): ONLY_FASTER,
    (
        "tensors/reading",
        "_pack_elements",
        "prod((size for size, _ in dims[inner - 1:])) <= _PLACES",
        "prod((size for size, _ in dims[inner - 1:])) < _PLACES",
    ): ONLY_FASTER,
    (
        "tensors/reading",
        "_pack_elements",
        "prod((size for size, _ in dims[inner - 1:])) <= _PLACES",
        "prod((size for size, _ in dims[inner - 1:])) > _PLACES",
    ): ONLY_FASTER,
    ("archives/zip_directory", "read_entries", "position != len(data)", "position < len(data)"): NEVER_BEYOND,
    ("archives/zip_directory", "widen", "len(wide) != sum(wanted)", "len(wide) > sum(wanted)"): NEVER_BEYOND,
    (
        "archives/zips",
        "_refuse_twins",
        "len({entry.name.lower() for entry in entries}) == len(entries)",
        "len({entry.name.lower() for entry in entries}) >= len(entries)",
    ): NEVER_BEYOND,
    ("archives/zips", "_note_gap", "min(len(LOCAL_MAGIC), nbytes)", "min(len(LOCAL_MAGIC), len(LOCAL_MAGIC))"): (
        "what follows a gap begins with P and cannot complete a mark that began in it"
    ),
    ("archives/zips", "_read_usual", "len(extra) != extra_n", "len(extra) < extra_n"): NEVER_LONGER,
    ("archives/zips", "_read_usual", "at + 16 > len(block)", "at + 16 >= len(block)"): LOOKED_AT_AGAIN,
    ("archives/zips", "_read_usual", "at + 16 > len(block)", "at + 16 <= len(block)"): LOOKED_AT_AGAIN,
    ("archives/zips", "_read_usual", "at + 16 > len(block)", "at + 17 > len(block)"): LOOKED_AT_AGAIN,
    ("archives/zips", "_read_usual", "at + 16 > len(block)", "at + 15 > len(block)"): LOOKED_AT_AGAIN,
    ("archives/zips", "_read_member", "min(24, limit - end)", "min(25, limit - end)"): BOUNDED_ELSEWHERE,
    ("archives/zips", "_read_member", "min(24, limit - end)", "min(24, 24)"): BOUNDED_ELSEWHERE,
    (
        "tensors/reading",
        "gather",
        "max(_SPAN_NBYTES, 4 * unit * count)",
        "max(_SPAN_NBYTES, _SPAN_NBYTES)",
    ): ONLY_FASTER,
    (
        "tensors/reading",
        "gather",
        "max(_SPAN_NBYTES, 4 * unit * count)",
        "max(_SPAN_NBYTES, 3 * unit * count)",
    ): ONLY_FASTER,
    (
        "tensors/reading",
        "gather",
        "span <= min(_MOST_NBYTES, _PER_READ_NBYTES * _runs(dims))",
        "span < min(_MOST_NBYTES, _PER_READ_NBYTES * _runs(dims))",
    ): ONLY_FASTER,
    (
        "tensors/reading",
        "gather",
        "min(_MOST_NBYTES, _PER_READ_NBYTES * _runs(dims))",
        "min(_PER_READ_NBYTES * _runs(dims), _PER_READ_NBYTES * _runs(dims))",
    ): ONLY_FASTER,
    ("tensors/reading", "gather", "dims[at][1] > 0", "dims[at][1] >= 0"): ONLY_FASTER,
    ("tensors/reading", "gather", "dims[at][1] > 0", "dims[at][1] <= 0"): ONLY_FASTER,
    ("tensors/reading", "gather", "dims[at][1] > 0", "dims[at][1] > -1"): ONLY_FASTER,
    ("sources/files", "__del__", "self._fd >= 0", "self._fd >= -1"): "closing again does nothing",
    ("formats/packed", "with_weights", "len(holding) < 2", "len(holding) < 1"): "one alone is chosen before",
    (
        "formats/sharded",
        "_read_shard",
        "len(groups) == len(flat) == 1",
        "len(groups) <= len(flat) == 1",
    ): "the flat ones are some of the groups",
    (
        "formats/sharded",
        "_read_shard",
        "len(groups) == len(flat) == 1",
        "len(groups) == len(flat) >= 1",
    ): "just one group has no key",
    (
        "checkpoints/contents",
        "_named",
        "len(texts) == len(below)",
        "len(texts) >= len(below)",
    ): "the keys are some of those below",
    (
        "migration/output/parts",
        "_is_unheld",
        "time.time() - written > _ABANDONED_SECONDS",
        "time.time() - written >= _ABANDONED_SECONDS",
    ): "to the very moment, no clock says it",
    (
        "formats/torch_legacy",
        "has_computed_magic",
        "first.end == source.nbytes",
        "first.end >= source.nbytes",
    ): NEVER_BEYOND,
    (
        "formats/safetensors",
        "decode",
        "len(listed) == len(order) == len(names) + len(ties)",
        "len(listed) <= len(order) == len(names) + len(ties)",
    ): "with one that is no text, a name is missing",
    (
        "formats/safetensors",
        "decode",
        "len(listed) == len(order) == len(names) + len(ties)",
        "len(listed) >= len(order) == len(names) + len(ties)",
    ): NEVER_BEYOND,
    (
        "formats/safetensors",
        "decode",
        "len(listed) == len(order) == len(names) + len(ties)",
        "len(listed) == len(order) <= len(names) + len(ties)",
    ): "a shorter one lacks a name",
    (
        "formats/safetensors",
        "_notes",
        "len(entry) > len(_FIELDS)",
        "len(entry) >= len(_FIELDS)",
    ): "without more fields there is nothing to say",
    (
        "archives/zip_directory",
        "_refuse_several",
        "at >= END64.size",
        "at > END64.size",
    ): "nothing stands in front of a record that is the first",
    (
        "archives/zip_directory",
        "_refuse_several",
        "start > 0",
        "start > 1",
    ): "the same mark cannot begin at two bytes in a row",
    ("tensors/tiling", "check_tiling", "len(inside) <= 1", "len(inside) < 1"): ONLY_FASTER,
    ("tensors/tiling", "check_tiling", "len(inside) <= 1", "len(inside) <= 0"): ONLY_FASTER,
    ("tensors/tiling", "_overlap", "len(boxes) > 1", "len(boxes) >= 1"): ALONE_FILLS_IT,
    ("tensors/tiling", "_overlap", "len(boxes) > 1", "len(boxes) > 0"): ALONE_FILLS_IT,
    (
        "tensors/tiling",
        "__init__",
        "max(8, isqrt(len(boxes)))",
        "max(isqrt(len(boxes)), isqrt(len(boxes)))",
    ): ONLY_FASTER,
    ("tensors/tiling", "__init__", "max(8, isqrt(len(boxes)))", "max(9, isqrt(len(boxes)))"): ONLY_FASTER,
    ("tensors/tiling", "__init__", "max(8, isqrt(len(boxes)))", "max(7, isqrt(len(boxes)))"): ONLY_FASTER,
    ("tensors/tiling", "meeting", "len(self._groups) > 1", "len(self._groups) >= 1"): ONLY_FASTER,
    ("tensors/tiling", "meeting", "len(self._groups) > 1", "len(self._groups) > 2"): ONLY_FASTER,
    ("tensors/tiling", "meeting", "len(self._groups) > 1", "len(self._groups) > 0"): ONLY_FASTER,
    ("tensors/pieces", "scatter", "width < _WIDE", "width <= _WIDE"): ONLY_FASTER,
    ("tensors/pieces", "scatter", "width < _WIDE", "width >= _WIDE"): ONLY_FASTER,
    (
        "tensors/pieces",
        "scatter",
        "run < max(sizes[:inner], default=0)",
        "run <= max(sizes[:inner], default=0)",
    ): ONLY_FASTER,
    ("tensors/pieces", "_by_columns", "min(rows, first + _BLOCK_ROWS)", "min(rows, rows)"): ONLY_FASTER,
    ("tensors/pieces", "band_nbytes", "nbytes <= _BAND_NBYTES", "nbytes < _BAND_NBYTES"): (
        "a row of just that size is so many of the next dimension's"
    ),
    ("tensors/pieces", "_opened", "len(piece.sizes) == 1", "len(piece.sizes) <= 1"): (
        "a piece without dimensions was given one"
    ),
    ("tensors/pieces", "_is_run", "size != 1", "size > 1"): "pieces without elements were left out",
    (
        "formats/torchscript_json",
        "_objects",
        "len(found) != len(_list(owner, key))",
        "len(found) < len(_list(owner, key))",
    ): NEVER_BEYOND,
    (
        "sources/checksums",
        "checksum_of_range",
        "stop - start < 2 * RUN_NBYTES",
        "stop - start <= 2 * RUN_NBYTES",
    ): ONLY_FASTER,
    (
        "sources/checksums",
        "checksum_of_range",
        "stop - start < 2 * RUN_NBYTES",
        "stop - start >= 2 * RUN_NBYTES",
    ): ONLY_FASTER,
    (
        "sources/checksums",
        "checksum_of_range",
        "stop - start < 2 * RUN_NBYTES",
        "stop - start < 3 * RUN_NBYTES",
    ): ONLY_FASTER,
    (
        "sources/checksums",
        "checksum_of_range",
        "stop - start < 2 * RUN_NBYTES",
        "stop - start < 1 * RUN_NBYTES",
    ): ONLY_FASTER,
    ("migration/transfer", "_send_extent", "extent.nbytes >= WORTH_A_THREAD", "extent.nbytes > WORTH_A_THREAD"): (
        ONLY_FASTER
    ),
    ("migration/transfer", "_send_extent", "extent.nbytes >= WORTH_A_THREAD", "extent.nbytes < WORTH_A_THREAD"): (
        ONLY_FASTER
    ),
    (
        "migration/in_place/zip_edit",
        "_name_at",
        "max(0, record.offset - FULL16 - LOCAL.size - len(name))",
        "max(0, 0)",
    ): ONLY_FASTER,
    (
        "migration/in_place/zip_edit",
        "_end_of",
        "max(0, source.nbytes - END_SEARCH)",
        "max(1, source.nbytes - END_SEARCH)",
    ): "the end record of a zip with a member does not stand at its first byte",
    ("migration/in_place/zip_edit", "_end_of", "max(0, source.nbytes - END_SEARCH)", "max(0, 0)"): ONLY_FASTER,
    ("migration/in_place/run", "_refuse_gaps", "begin == position", "begin <= position"): (
        "no tensor of a file that was read begins inside another"
    ),
    ("migration/in_place/run", "_refuse_gaps", "position != end", "position < end"): NEVER_BEYOND,
    ("migration/in_place/run", "_keys", "len(encoded) != len(texts)", "len(encoded) < len(texts)"): (NEVER_BEYOND),
    ("formats/directories/rank_files/parts", "_layout", "len(said) != 2", "len(said) < 2"): NEVER_LONGER,
    (
        "formats/directories/rank_files/parts",
        "_layout",
        "len(known) == len(sizes)",
        "len(known) >= len(sizes)",
    ): NEVER_BEYOND,
    ("sources/pool", "_make_room", "len(self._open) > most", "len(self._open) >= most"): EMPTY_ANYWAY,
    ("formats/directories/dcp/ranks", "_places", "begin < use[1]", "begin <= use[1]"): ONLY_FASTER,
    ("formats/directories/dcp/ranks", "_in_rows", "size <= 0", "size < 0"): ONLY_FASTER,
    ("formats/directories/dcp/ranks", "_in_rows", "size <= 0", "size > 0"): ONLY_FASTER,
    ("formats/directories/dcp/ranks", "_in_rows", "size <= 0", "size <= 1"): ONLY_FASTER,
    ("formats/directories/dcp/ranks", "_in_rows", "size <= 0", "size <= -1"): ONLY_FASTER,
    ("formats/directories/dcp/ranks", "_in_rows", "size != whole", "size == whole"): ONLY_FASTER,
    ("formats/directories/dcp/ranks", "_in_rows", "size != whole", "size < whole"): ONLY_FASTER,
    ("formats/directories/dcp/ranks", "_in_rows", "size != whole", "size > whole"): ONLY_FASTER,
    ("sources/journal", "journal_name", "len(found) <= _LONGEST // 4", "len(found) < _LONGEST // 4"): ONLY_FASTER,
    ("sources/journal", "journal_name", "len(found) <= _LONGEST // 4", "len(found) <= _LONGEST // 5"): ONLY_FASTER,
    (
        "migration/in_place/zip_edit",
        "_pieces",
        "min(start + _PIECE, run.end)",
        "min(run.end, run.end)",
    ): "in one piece it says the same, and takes more memory",
}
"""``(module, function, before, after)``, and the reason."""
