"""Wire layout v1: every byte where the README says, every damage noticed."""

import struct
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilocox_kernels.checksum import checksum64
from dilocox_kernels.wire import HEADER_BYTES, Header, WireError, pack_header, unpack

U64 = st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    Header,
    nonfinite=st.booleans(),
    island=st.integers(0, 2**32 - 1),
    fragment=st.integers(0, 2**32 - 1),
    hop=st.integers(0, 255),
    **dict.fromkeys(["fingerprint", "number", "start", "numel", "tokens", "steps", "documents", "checksum"], U64),
)
HEADER = Header(
    nonfinite=False,
    fingerprint=0x1122334455667788,
    number=7,
    island=1,
    fragment=2,
    hop=1,
    start=64,
    numel=32,
    tokens=1000,
    steps=50,
    documents=9,
    checksum=0x99AABBCCDDEEFF00,
)


def message(header: Header, body: bytes) -> Tensor:
    packed = torch.tensor([0xAA] * HEADER_BYTES + list(body), dtype=torch.uint8)
    pack_header(header, packed)
    return packed


@given(HEADERS, st.binary(max_size=40))
def test_what_is_packed_is_unpacked_and_the_body_is_not_copied(header: Header, body: bytes) -> None:
    packed = message(header, body)
    unpacked, view = unpack(packed)
    assert unpacked == header
    assert bytes(view.tolist()) == body
    assert view.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()


@given(HEADERS)
def test_every_field_lies_where_the_readme_says(header: Header) -> None:
    packed = message(header, b"12345")
    raw = bytes(packed.tolist())
    assert raw[:8] == b"DLCX" + struct.pack("<HBB", 1, header.nonfinite, header.hop)
    narrow, wide = {"island": 8, "fragment": 12}, ["fingerprint", "number", "start", "numel", "tokens", "steps"]
    places = {name: (place, 4) for name, place in narrow.items()}
    places |= {name: (16 + 8 * i, 8) for i, name in enumerate([*wide, "documents", "checksum"])}
    for name, (place, width) in places.items():
        assert int.from_bytes(raw[place : place + width], "little") == asdict(header)[name], name
    assert int.from_bytes(raw[80:88], "little") == 5
    assert raw[88:120] == bytes(32)
    without_its_checksum = torch.cat([packed[:120], torch.zeros(8, dtype=torch.uint8), packed[128:]])
    assert int.from_bytes(raw[120:128], "little") == checksum64(without_its_checksum)


def test_every_flipped_bit_is_refused() -> None:
    packed = message(HEADER, bytes(range(20)))
    for place in range(packed.numel()):
        for bit in range(8):
            packed[place] ^= 1 << bit
            with pytest.raises(WireError):
                unpack(packed)
            packed[place] ^= 1 << bit
    assert unpack(packed)[0] == HEADER


@given(st.integers(0, HEADER_BYTES + 19))
def test_a_cut_message_is_refused(length: int) -> None:
    with pytest.raises(WireError, match="length"):
        unpack(message(HEADER, bytes(20))[:length])


@pytest.mark.parametrize(
    ("place", "replacement", "reason"),
    [
        (0, b"HTTP", "magic: b'HTTP'"),
        (4, b"\x02", "version: the sender writes 2"),
        (80, b"\x15", "length: the header announces 21 bytes, 20 came"),
        (8, b"\x05", "checksum: the header announces"),
        (127, b"\x05", "checksum: the header announces"),
        (140, b"\x05", "checksum: the header announces"),
    ],
)
def test_each_damage_is_named(place: int, replacement: bytes, reason: str) -> None:
    packed = message(HEADER, bytes(20))
    packed[place : place + len(replacement)] = torch.tensor(list(replacement), dtype=torch.uint8)
    with pytest.raises(WireError, match=reason):
        unpack(packed)


def test_trailing_bytes_are_refused() -> None:
    longer = torch.cat([message(HEADER, bytes(20)), torch.zeros(4, dtype=torch.uint8)])
    with pytest.raises(WireError, match="length"):
        unpack(longer)


@given(st.binary(min_size=HEADER_BYTES, max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        unpack(torch.tensor(list(data), dtype=torch.uint8))


def test_a_field_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(struct.error):
        message(replace(HEADER, hop=256), b"")
