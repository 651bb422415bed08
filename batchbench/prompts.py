"""Prompts that are text: the set that ships with batchbench, and files of people's own."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path

from batchbench.errors import ScenarioError
from batchbench.text_files import read_text

NATURAL = "natural"
_MAX_BYTES = 2**28  # of a file: beyond any real set, small enough not to fill memory


def load_prompts(source: str | os.PathLike[str]) -> tuple[str, ...]:
    """The texts of `natural`, or of a file: .txt has one prompt per line, .toml a list of strings called `prompts`.

    Blank lines of a .txt file are passed over. Nothing in a file is run. Raises ScenarioError, one line.
    """
    path = Path(__file__).with_name("natural.toml") if source == NATURAL else Path(source)
    if path.suffix not in (".txt", ".toml"):
        raise ScenarioError(
            f"workload.prompts: {str(source)!r} is neither 'natural' nor the path of a .txt or .toml file"
        )
    text = read_text(path, _MAX_BYTES)
    prompts = text.split("\n") if path.suffix == ".txt" else _listed(path, text)
    found = tuple(prompt for prompt in prompts if prompt.strip())
    if not found:
        raise ScenarioError(f"{path}: there are no prompts in it")
    return found


def _listed(path: Path, text: str) -> Sequence[str]:
    """The list `prompts` of a TOML file that holds nothing else."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScenarioError(f"{path}: not valid TOML: {error}") from None
    prompts = document.pop("prompts", None)
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts) or document:
        raise ScenarioError(f"{path}: must hold one list of strings, prompts = [...], and nothing else")
    if blank := [place for place, prompt in enumerate(prompts) if not prompt.strip()]:
        raise ScenarioError(f"{path}: prompts.{blank[0]} is empty")
    return prompts
