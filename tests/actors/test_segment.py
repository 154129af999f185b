import pytest

from trouper.actors.segment import Segment, read_segment
from trouper.channels import RunError

RECORDS = [b"first", b"", bytes(range(256)), b"last"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "00000001.log"


@pytest.fixture
def sizes(path):
    """A segment of all records; its size before the first and after each."""
    segment = Segment(path, 3, RECORDS[:1])
    found = [len(b"trouper-ledger 1 life 3\n"), path.stat().st_size]
    for record in RECORDS[1:]:
        segment.append([record])
        found.append(path.stat().st_size)
    segment.close()
    return found


def read(path):
    damaged = []
    records = list(read_segment(path, damaged.append))
    return records, damaged


def test_records_come_back_with_their_offsets(path, sizes):
    assert read(path) == (list(zip(sizes[:-1], RECORDS, strict=True)), [])
    assert path.read_bytes().startswith(b"trouper-ledger 1 life 3\n")


def test_a_torn_record_is_cut_off_and_told(path, sizes):
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        records, damaged = read(path)
        assert [record for _, record in records] == RECORDS[: max(0, sum(end <= size for end in sizes) - 1)]
        if size in sizes:
            assert damaged == []
        else:
            (sentence,) = damaged
            assert f"{path} is cut off" in sentence
            assert f"at byte {max((end for end in sizes if end < size), default=0)}" in sentence


def test_nothing_after_a_damaged_byte_is_trusted(path, sizes):
    whole = path.read_bytes()
    for place in range(len(whole)):
        if whole[place : place + 1] == b"1":
            continue  # the version's own digit
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        records, damaged = read(path)
        assert [record for _, record in records] == RECORDS[: max(0, sum(end <= place for end in sizes) - 1)]
        assert len(damaged) == 1


def test_a_tail_of_zeros_is_no_row_of_empty_records(path, sizes):
    with path.open("ab") as file:
        file.write(bytes(64))
    records, (sentence,) = read(path)
    assert len(records) == len(RECORDS)
    assert f"{path} is damaged at byte {sizes[-1]}" in sentence


def test_another_format_is_refused(path):
    path.write_bytes(b"trouper-ledger 2 life 4\nwhatever")
    with pytest.raises(RunError, match=r"00000001\.log has format 2 and this trouper reads format 1"):
        read(path)


def test_a_segment_is_never_written_over(path, sizes):
    with pytest.raises(FileExistsError):
        Segment(path, 4, [])
    assert path.stat().st_size == sizes[-1]
