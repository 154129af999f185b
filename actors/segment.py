"""One file of a log: records as bytes, framed so that a reader can tell a whole record from a torn one.

A segment begins with a line of text that names the format's version and the life that wrote it. Then come frames: a
record's length, a CRC-32 of length and record, the record. A segment is only ever appended to, and by one process, so
a kill can tear no more than what was being written. Knows nothing about what the records say.
"""

import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from trouper.channels import RunError

FORMAT = 1
"""The version of segments that this code writes, and the only one it reads."""

_FIRST_LINE = re.compile(rb"trouper-ledger (\d+) life \d+\n")
_FIRST_LINE_BYTES = 64
_FRAME = struct.Struct("<II")


class Segment:
    """A new file that is appended to. After an error the only way on is `close`, and another segment.

    Args:
        path: does not exist yet.
        life: which life of the run writes it.
        records: what it begins with.

    Raises:
        OSError: it cannot be made; then nothing is left of it.
    """

    def __init__(self, path: Path, life: int, records: Iterable[bytes]) -> None:
        self.path = path
        self._file = path.open("xb", buffering=0)
        self._size = 0
        try:
            self._write(chain([b"trouper-ledger %d life %d\n" % (FORMAT, life)], map(_frame, records)))
            sync_folder(path.parent)
        except BaseException:
            self.close()
            path.unlink()
            raise

    def append(self, records: Iterable[bytes]) -> None:
        """Write the records and bring them to disk.

        Raises:
            OSError: that failed; none of them counts.
        """
        self._write(map(_frame, records))

    def close(self) -> None:
        """Close the file, without what an append that failed left behind."""
        with self._file:
            if self._file.tell() != self._size:
                with suppress(OSError):  # a reader can do with a torn end
                    os.ftruncate(self._file.fileno(), self._size)

    def _write(self, chunks: Iterable[bytes]) -> None:
        try:
            for chunk in chunks:
                rest = memoryview(chunk)
                while rest:
                    rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._size = self._file.tell()


def read_segment(path: Path, damaged: Callable[[str], None]) -> Iterator[tuple[int, bytes]]:
    """A segment's records with their byte offsets, as far as they can be trusted; one is in memory at a time.

    Args:
        path: the file.
        damaged: is told in a sentence what was left out, and from which byte on.

    Raises:
        OSError: the file cannot be read.
        RunError: its format is another one.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        first_line = file.readline(_FIRST_LINE_BYTES)
        version = _FIRST_LINE.fullmatch(first_line)
        if version is None:
            cut = size < _FIRST_LINE_BYTES and not first_line.endswith(b"\n")
            damaged(f"{path} {'is cut off in' if cut else 'has another'} first line, at byte 0: all of it was left out")
            return
        if int(version[1]) != FORMAT:
            raise RunError(
                f"{path} has format {int(version[1])} and this trouper reads format {FORMAT}; go on with the version "
                "of trouper that wrote it"
            )
        while (offset := file.tell()) < size:
            header = file.read(_FRAME.size)
            length, checksum = _FRAME.unpack(header) if len(header) == _FRAME.size else (size, 0)
            if file.tell() + length > size:
                damaged(f"{path} is cut off at byte {offset}: the last {size - offset} bytes are no whole record")
                return
            record = file.read(length)
            if _checksum(record) != checksum:
                damaged(
                    f"{path} is damaged at byte {offset}, where a checksum does not match: all from there, "
                    f"{size - offset} bytes, was left out"
                )
                return
            yield offset, record


def sync_folder(folder: Path) -> None:
    """Bring new and deleted names of a folder to disk.

    Raises:
        OSError: that failed.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _frame(record: bytes) -> bytes:
    return _FRAME.pack(len(record), _checksum(record)) + record


def _checksum(record: bytes) -> int:
    # The length is part of it: else a tail of zeros, as a crashed file system leaves, would be a row of empty records.
    return zlib.crc32(record, zlib.crc32(struct.pack("<I", len(record))))
