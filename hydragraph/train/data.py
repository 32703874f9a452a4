"""From a run's paths to its mini-batches: the tokenizer and the token file are made once and cached."""

from __future__ import annotations

import hashlib
import json
import shutil
import sysconfig
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from hydragraph.data import corpus, tokenizer
from hydragraph.data.mini_batches import MiniBatches, Split
from hydragraph.data.token_file import TokenFile, write_tokens
from hydragraph.train.config import DataConfig, TrainConfig

STDLIB = "python-stdlib"
_TOKENS = "tokens.bin"
# Packages of others, and the tests, which are as large as everything else and hold files that are broken on purpose.
_NOT_STDLIB = ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3")

Progress = Callable[[str, int], None]


@dataclass(frozen=True, eq=False)
class Tokens:
    """A prepared corpus: its tokenizer and its token file."""

    tokenizer: Tokenizer
    file: TokenFile


def prepare(config: TrainConfig, progress: Progress | None = None) -> Path:
    """Make the tokenizer and the token file of a run unless they are cached, and return their directory.

    Args:
        config: of the run.
        progress: called with what is being done and how many documents are done.

    Raises:
        ValueError: the corpus or the tokenizer cannot be used.
    """
    data = config.data
    existing = _known_tokenizer(config)
    paths, suffixes = _paths(data)
    directory = _cache(config) / _key(data, paths, suffixes, existing)
    if _is_whole(directory):
        return directory
    report = progress or (lambda what, done: None)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.partial")
    try:
        if existing is None:
            texts = corpus.documents(paths, suffixes, data.text_field)
            encoder = tokenizer.train_bpe(_counted(texts, "training a tokenizer", report), data.vocab_size)
        else:
            encoder = tokenizer.load(existing)
        tokenizer.save(encoder, partial)
        texts = corpus.documents(paths, suffixes, data.text_field)
        write_tokens(partial / _TOKENS, texts, encoder, lambda done, _: report("writing the token file", done))
        # The directory appears when it is complete; where another run was faster, its own is as good.
        if not _is_whole(directory):
            shutil.rmtree(directory, ignore_errors=True)  # where somebody deleted a damaged token file
            partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def open_tokens(directory: Path) -> Tokens:
    """Open what `prepare` made."""
    return Tokens(tokenizer.load(directory), TokenFile.open(directory / _TOKENS))


def verify(directory: Path, progress: Progress | None = None) -> None:
    """Read all that `prepare` made, to notice what a disk or a copy has changed since; once per run and host is enough.

    Without it a changed token would train the model on another text, and nothing would tell.

    Args:
        directory: that `prepare` returned.
        progress: as for `prepare`.

    Raises:
        ValueError: the token file is not what was written; once it is deleted, `prepare` makes it anew.
    """
    report = progress or (lambda what, done: None)
    TokenFile.open(directory / _TOKENS).verify(lambda done: report("checking the token file", done))


def _is_whole(directory: Path) -> bool:
    return (directory / _TOKENS).is_file()


def mini_batches(config: TrainConfig, file: TokenFile, split: Split = "train") -> MiniBatches:
    """Return the endless stream of a run's training or held-out mini-batches."""
    data = config.data
    return MiniBatches(file, data.tokens_per_step, data.max_length, config.seed, split, data.heldout)


def evaluation_batches(config: TrainConfig, file: TokenFile) -> list[list[Tensor]]:
    """Return the held-out mini-batches that every evaluation of a run reads."""
    return list(islice(mini_batches(config, file, "heldout").single_pass(), config.evaluate_batches))


def stdlib_files(root: Path | None = None) -> list[Path]:
    """List the source files of this Python's standard library, without tests and installed packages.

    Args:
        root: another library's directory.
    """
    folder = root or Path(sysconfig.get_path("stdlib"))
    # Entry by entry: installed packages may be many more files than the library itself.
    entries = [e for e in sorted(folder.iterdir()) if e.name not in _NOT_STDLIB and not e.name.startswith((".", "__"))]
    sources = [e for e in entries if e.suffix == ".py" or (e.is_dir() and any(e.rglob("*.py")))]
    paths = corpus.files(sources, (".py",))
    return [path for path in paths if not set(path.relative_to(folder).parts) & set(_NOT_STDLIB)]


def _paths(data: DataConfig) -> tuple[list[Path], tuple[str, ...] | None]:
    """Return the corpus's paths, the special name replaced by its files."""
    paths: list[Path] = []
    for name in data.paths:
        paths += stdlib_files() if name == STDLIB else [Path(name)]
    return paths, data.suffixes


def _known_tokenizer(config: TrainConfig) -> Path | None:
    """Return the tokenizer that the config names, or that the model to continue brings; None: train one."""
    if config.data.tokenizer is not None:
        path = Path(config.data.tokenizer)
    elif config.model.directory is not None:
        path = Path(config.model.directory)
        if not (path / "tokenizer.json").is_file():
            where = "model.path" if config.model.path is not None else "model.weights"
            raise ValueError(
                f"{where} {path} holds no tokenizer.json: set data.tokenizer to one, or to a directory with one"
            )
    else:
        return None
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"data.tokenizer: there is no {file}: name a tokenizer.json or a directory with one")
    return file


def _cache(config: TrainConfig) -> Path:
    return Path(config.data.cache) if config.data.cache is not None else Path(config.output) / "data"


def _key(data: DataConfig, paths: list[Path], suffixes: tuple[str, ...] | None, existing: Path | None) -> str:
    """Return 16 hexadecimal digits over all that the cached files depend on."""
    how = f"vocab_size {data.vocab_size}" if existing is None else hashlib.sha256(existing.read_bytes()).hexdigest()
    content = json.dumps([corpus.fingerprint(paths, suffixes, data.text_field), how])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _counted(texts: Iterable[str], what: str, progress: Progress) -> Iterator[str]:
    """Yield texts, reporting every hundredth."""
    count = 0
    for count, text in enumerate(texts, start=1):
        if count % 100 == 0:
            progress(what, count)
        yield text
    progress(what, count)
