"""
The records of a zip, as they are written in the file.

Source: PKWARE APPNOTE 6.3.10, https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT; numbers are its sections.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

LOCAL_MAGIC: Final = b"PK\x03\x04"
LOCAL: Final = Struct("<4s5H3L2H")
"""4.3.7 Local file header: magic, version needed, flags, method, time, date, CRC-32, packed size, size, and the lengths
of name and extra fields, which follow."""

DESCRIPTOR_MAGIC: Final = b"PK\x07\x08"
DESCRIPTOR: Final = Struct("<3L")
"""4.3.9 Data descriptor, after its magic, which is optional: CRC-32, packed size, size."""
DESCRIPTOR64: Final = Struct("<LQQ")
"""4.3.9.2 The same of a zip64 member."""

ENTRY_MAGIC: Final = b"PK\x01\x02"
ENTRY: Final = Struct("<4s6H3L5H2L")
"""4.3.12 Central directory header: magic, made by, then as LOCAL from the version needed to the length of the extra
fields; length of the comment, disk, internal and external attributes, offset of the local header."""

END64_MAGIC: Final = b"PK\x06\x06"
END64: Final = Struct("<4sQ2H2L4Q")
"""4.3.14 Zip64 end of central directory record."""
LOCATOR_MAGIC: Final = b"PK\x06\x07"
LOCATOR: Final = Struct("<4sLQL")
"""4.3.15 Zip64 end of central directory locator."""
END_MAGIC: Final = b"PK\x05\x06"
END: Final = Struct("<4s4H2LH")
"""4.3.16 End of central directory record; a comment of at most 65,535 bytes follows."""

FULL16: Final = 0xFFFF
FULL32: Final = 0xFFFFFFFF
"""4.4.1.4 A count, a size or an offset that is in a zip64 record or field instead."""

FLAG_DESCRIPTOR: Final = 0x0008
FLAG_PATCHED: Final = 0x0020
FLAG_UTF8: Final = 0x0800
FLAGS_ENCRYPTED: Final = 0x0001 | 0x0040 | 0x2000
"""4.4.4 General purpose bit flag: bit 3, 5, 11; 0, 6 and 13."""

FIELD: Final = Struct("<HH")
"""4.5.1 Extra field: tag and length; its data follows."""
ZIP64_TAG: Final = 0x0001
"""4.5.3"""
UNICODE_PATH_TAG: Final = 0x7075
"""4.6.9"""
