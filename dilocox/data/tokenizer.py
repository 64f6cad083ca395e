"""Tokenizers: text to token ids and back. Bytes are the only one so far; they need no vocabulary file."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from dilocox import config

Tokens = npt.NDArray[np.uint16]


class Tokenizer(Protocol):
    """What a corpus asks of a tokenizer; token ids fit into 16 bits."""

    name: str
    vocab_size: int
    end_of_document: int

    def encode(self, text: str) -> Tokens:
        """The tokens of a text, uint16 [tokens], without the end-of-document token."""

    def decode(self, tokens: npt.ArrayLike) -> str:
        """The text behind tokens; end-of-document tokens vanish, a character that was cut becomes U+FFFD."""


class ByteTokenizer:
    """The 256 values of a UTF-8 byte, and one token more that ends a document."""

    name = "bytes"
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: npt.ArrayLike) -> str:
        array = np.asarray(tokens)
        return array[array != self.end_of_document].astype(np.uint8).tobytes().decode(errors="replace")


def build_tokenizer(choice: config.Tokenizer) -> Tokenizer:
    return {config.Tokenizer.bytes: ByteTokenizer}[choice]()
