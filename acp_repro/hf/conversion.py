"""Converts folders between the authors' format and that of transformers: the same tensors, bit for bit."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig

from acp_repro.common.files import replacing
from acp_repro.model import FoXConfig, FoXForCausalLM, save_pretrained
from acp_repro.model.pretrained import WEIGHTS_FILE, config_to_official, find_folder, read_checkpoint

from .configuration import ForgettingTransformerConfig
from .modeling import ForgettingTransformerForCausalLM
from .tokenization import FoXTokenizer, JSONGPT2Tokenizer

_TOKENIZER_FILE = "tokenizer.json"
_BYTES_VOCAB_SIZE = 257  # byte-level models: 256 bytes and BOS


def to_official(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Writes a folder in the authors' format, which is also the format of this project."""
    config, tensors = read_checkpoint(FoXForCausalLM, source)
    with torch.device("meta"):
        model = FoXForCausalLM(config)
    save_pretrained(model, target, tensors)
    file = find_folder(source) / _TOKENIZER_FILE
    if file.is_file():
        with replacing(Path(target) / _TOKENIZER_FILE) as copy:
            copy.write_bytes(file.read_bytes())


def to_transformers(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, longcrawl64: bool = False
) -> None:
    """Writes a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` read after ``import acp_repro.hf``.

    With ``longcrawl64``, the model reads JSON-escaped text, and ``tokenizer.json`` is GPT-2's.
    """
    config, tensors = read_checkpoint(FoXForCausalLM, source)
    target = Path(target)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(find_folder(source), config, longcrawl64)
    end: int | None = None if tokenizer is None else tokenizer.eos_token_id  # pyright: ignore[reportAssignmentType]
    dtypes = {tensor.dtype for tensor in tensors.values()}
    hf_config = ForgettingTransformerConfig(
        **{name: value for name, value in config_to_official(config).items() if name != "model_type"},
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        architectures=[ForgettingTransformerForCausalLM.__name__],
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
    )
    with replacing(target / WEIGHTS_FILE) as file:
        save_file(tensors, file, metadata={"format": "pt"})
    hf_config.save_pretrained(target)
    GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end).save_pretrained(target)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)


def _tokenizer(folder: Path, config: FoXConfig, longcrawl64: bool) -> FoXTokenizer | JSONGPT2Tokenizer | None:
    path = folder / _TOKENIZER_FILE
    if longcrawl64:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; copy GPT-2's tokenizer.json there")
        return JSONGPT2Tokenizer.from_pretrained(str(folder))
    if path.is_file():
        try:
            bpe = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exceptions
            raise ValueError(f"{path} is not a tokenizer ({error}); copy or download it again") from error
    elif config.vocab_size == _BYTES_VOCAB_SIZE:
        bpe = bytes_tokenizer()
    else:
        return None
    tokenizer = FoXTokenizer(tokenizer_object=bpe)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"{path} has {len(tokenizer)} ids, but the model has {config.vocab_size}; replace "
            "the file by the tokenizer of the model's training run"
        )
    return tokenizer


def bytes_tokenizer() -> Tokenizer:
    """A BPE without merges, so that token ids are the bytes of the text."""
    characters = byte_characters()
    bpe = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    return bpe


def byte_characters() -> Mapping[int, str]:
    """The character of each byte in byte-level BPE: the byte's own, or the next unused one from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
