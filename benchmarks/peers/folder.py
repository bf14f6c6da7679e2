"""A named shape as a folder that other engines load: config and a tiny tokenizer, no weights.

The shape is the one that `random:` models have here, so both sides run the same network.
"""

import json
from pathlib import Path
from typing import Any

from kvatlas.models.shapes import SHAPES

WORDS = 300  # of the tokenizer; engines that want one do not use it
MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def write_folder(model: str, root: Path) -> Path:
    """Writes the folder of random:SHAPE below `root` and returns it. KeyError for an unknown shape."""
    name = model.removeprefix("random:")
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", _config(dict(SHAPES[name])))
    _write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    _write_tokenizer(folder)
    return folder


def _config(shape: dict[str, Any]) -> dict[str, Any]:
    architecture = shape["architectures"][0]
    extra = {"model_type": MODEL_TYPES[architecture], "hidden_act": "silu", "attention_bias": False}
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    return {**shape, **extra, **ids, "torch_dtype": "bfloat16", "initializer_range": 0.02}


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    words = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"t{number}": number for number in range(3, WORDS)}}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **marks})


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")
