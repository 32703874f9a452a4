"""Mini-batches of a run, with cached tokenizers and token files."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hydragraph.data import corpus, tokenizer
from hydragraph.data.chat import CHATML, CHATML_TOKENS, DocumentEncoder, chatml
from hydragraph.data.documents import FieldNames, texts_of
from hydragraph.data.mini_batches import Drawn, MiniBatches, Mixture, Split
from hydragraph.data.parts import EncodedParts
from hydragraph.data.template import ChatTemplate
from hydragraph.data.token_file import TokenFile, vocabulary_of, write_encoded
from hydragraph.errors import listed
from hydragraph.spec.record import read_text
from hydragraph.train.config import DataConfig, SourceConfig, TrainConfig
from hydragraph.train.reference_scores import Scores, evaluation_name, train_name

STDLIB = "python-stdlib"
# Version of the token files' encoding, a part of the cache key
_ENCODING = 6
_TOKENS = "tokens"
_TOKENIZER = "tokenizer.json"
_MOST_STEPS = 10**8
# Python's tests contain deliberate errors.
_NOT_STDLIB = ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3")

# Progress callback: activity, number of finished documents, finished fraction (0 if unknown).
Progress = Callable[[str, int, float], None]


@dataclass(frozen=True, eq=False)
class PreparedCorpus:
    directory: Path
    tokenizer: Tokenizer
    files: tuple[TokenFile, ...]
    evaluation: Mapping[str, TokenFile]

    @property
    def vocabulary(self) -> int:
        return self.files[0].vocabulary

    @property
    def end_of_text(self) -> int:
        return self.files[0].end_of_text

    @property
    def fingerprint(self) -> str:
        return " ".join(file.fingerprint for file in (*self.files, *self.evaluation.values()))


_NO_TEXT = (
    "the corpus holds no text: check data.paths, data.suffixes and data.text_field; documents that are not UTF-8 are "
    "skipped"
)


def check_data(config: TrainConfig) -> None:
    """Check the tokenizer, the chat template and each file's first record."""
    data = config.data
    holds: set[str] = set()
    for source in (*data.sources, *data.evaluation.values()):
        formats = corpus.formats(*_read_from(source))
        if source.format not in ("auto", "text") and "text" in formats:
            remedy = "leave data.format out" if config.objective is None else "name only files with pairs"
            raise ValueError(
                f"data.format is {source.format}, but the corpus also has text files, which cannot have this format: "
                f"{remedy}, or exclude the text files with data.suffixes"
            )
        holds |= formats
    if not holds:
        for source in data.sources:
            corpus.refuse_other_encodings(*_read_from(source)[:2])
        raise ValueError(_NO_TEXT)
    if "preference" in holds and config.objective is None:
        raise ValueError(
            "the data has pairs of answers (chosen, rejected): set 'objective: {dpo: {beta: 0.1}}'; to train only on "
            "the preferred answers, set data.format to 'completion' and data.completion_field to 'chosen'"
        )
    existing = _known_tokenizer(config)
    if existing is not None:
        tokenizer.end_id(tokenizer.load(existing), existing.parent)
    elif "tokens" in holds:
        raise ValueError("the data has token ids: set data.tokenizer to the tokenizer that produced them")
    template = _template_text(config, existing, "chat" in holds)
    if "chat" in holds and template is None:
        raise ValueError(
            f"{existing} has no chat template, which conversations need: set data.chat_template to 'chatml' or to a "
            "template file"
        )


def _shared_files(config: TrainConfig) -> Iterator[str]:
    trained: dict[str, str] = {}
    for name, source in _corpora(config.data).values() if config.evaluates else ():
        files = {os.path.realpath(path): str(path) for path in corpus.files(_paths(source), source.suffixes)}
        shared = [path for path in files if path in trained]
        training = not name.startswith("data.evaluation.")
        if shared and (config.held_out or not training):
            more = f" and {len(shared) - 1} more files are" if shared[1:] else " is"
            yield (
                f"{files[shared[0]]}{more} in {trained[shared[0]]} and in {name}, so the run is evaluated on its "
                "training data: list each file only once (in paths, name files instead of their directory)"
            )
        trained.update(dict.fromkeys(files, name) if training else {})


def length_remarks(config: TrainConfig, tokens: PreparedCorpus) -> Iterator[str]:
    most = config.data.max_length
    cut = config.data.overlong == "cut"
    size, name, one = (1, "documents", "a document") if config.objective is None else (2, "pairs", "an answer")
    files = (*tokens.files, *(tokens.evaluation.values() if config.evaluates else ()))
    for i, ((where, source), file) in enumerate(zip(_corpora(config.data).values(), files, strict=False)):
        if cut and not file.targeted:
            continue
        if i < len(tokens.files):
            streams = [_training_stream(config, i, file, split) for split in _splits(config)]
        else:
            streams = [_stream(config, source, file)]
        kept = len(set().union(*(stream.chunks.documents.tolist() for stream in streams)))
        of = f" of {where}" if len(files) > 1 else ""
        if out := (len(file) - kept) // size:
            why = "has no targets" if cut else "does not fit"
            yield f"{out:,} of {len(file) // size:,} {name}{of} are skipped: with data.max_length {most}, {one} {why}"
        if cut and (longer := int((file.lengths > most).sum())):
            what, done = ("documents", "cut") if size == 1 else ("answers", "truncated")
            yield f"{longer:,} of {len(file):,} {what}{of} are longer than data.max_length, and are {done}"


def _splits(config: TrainConfig) -> tuple[Split, ...]:
    return ("train", "heldout") if config.held_out else ("train",)


def data_remarks(config: TrainConfig) -> Iterator[str]:
    try:
        template = _template_text(config, _known_tokenizer(config), chats=True)
    except ValueError:
        # `check_data` and the run raise this error
        template = None
    for name in ("heldout", "evaluation") if not config.evaluates else ():
        if getattr(config.data, name):
            yield f"data.{name} is set, but the run never evaluates: set evaluate_every or evaluate_per_epoch"
    yield from _shared_files(config)
    for source in (*config.data.sources, *config.data.evaluation.values()):
        paths = _paths(source)
        omitted = [str(path) for path in corpus.left_out(paths, source.suffixes)]
        if omitted:
            remedy = "name the files in 'paths' or 'evaluation', or set 'suffixes'"
            yield f"these data files are not read: {listed(omitted)}; {remedy}"
        fields = corpus.unread(paths, source.suffixes, source, template)
        if fields:
            yield f"these fields of the data are not read: {', '.join(fields)}"


def prepare(config: TrainConfig, progress: Progress | None = None) -> Path:
    """Return the directory of a run's tokenizer and token files, which are created if missing.

    The next call continues an interrupted preparation. Raise ValueError if the corpus or tokenizer is unusable.
    """
    data = config.data
    existing = _known_tokenizer(config)
    names = _corpora(data)
    directory = _cache(config) / _key(config, existing)
    # The directory's name is a digest of all inputs, so complete files are never outdated.
    if _is_whole(directory, names):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Files are written to a hidden directory, renamed when complete.
    partial = directory.with_name(f".{directory.name}.partial")
    with _alone(partial):
        # Another process created the directory
        if _is_whole(directory, names):
            return directory
        check_data(config)
        try:
            _make(config, existing, partial, progress or (lambda what, done, part: None))
        except ValueError:
            # The user must change the data, so partial files are useless
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    return directory


def _make(config: TrainConfig, existing: Path | None, partial: Path, progress: Progress) -> None:
    if not (partial / _TOKENIZER).is_file():
        directory = partial / "tokenizer"
        shutil.rmtree(directory, ignore_errors=True)
        _make_tokenizer(config, existing, directory, progress)
        # Move tokenizer.json last: it marks completion.
        for file in sorted(directory.iterdir(), key=lambda file: file.name == _TOKENIZER):
            file.replace(partial / file.name)
        directory.rmdir()
    encoder = _encoder(config, partial)
    for name, (where, source) in _corpora(config.data).items():
        # Written by an interrupted call.
        if (partial / name).is_file():
            continue
        what = "writing the token file" if name == f"{_TOKENS}.bin" else f"writing {name}"
        reading = corpus.CorpusReport()
        placed = corpus.documents(*_read_from(source), reading, source.max_samples)
        parts = EncodedParts(partial / f"{name}.parts")
        for done in parts.encoded(placed, encoder):
            progress(what, done, reading.part)
        if not reading.documents:
            corpus.refuse_other_encodings(*_read_from(source)[:2])
            elsewhere = f"{where} holds no text: check its paths, suffixes and text_field"
            raise ValueError(_NO_TEXT if where == "data.paths" else elsewhere)
        vocabulary = vocabulary_of(encoder.tokenizer)
        write_encoded(partial / name, parts.read(), vocabulary, encoder.end, parts.targeted)
        parts.remove()


def _make_tokenizer(config: TrainConfig, existing: Path | None, directory: Path, progress: Progress) -> None:
    data = config.data
    template = data.chat_template
    if existing is not None:
        encoder = tokenizer.load(existing)
        if (existing.parent / "tokenizer_config.json").is_file():
            tokenizer.copy(existing.parent, directory)
            encoder.save(str(directory / _TOKENIZER))
        else:
            tokenizer.save(encoder, directory)
    else:
        chats = any("chat" in corpus.formats(*_read_from(s)) for s in data.sources)
        special = (tokenizer.END_OF_TEXT, *(CHATML_TOKENS if chats else ()))
        readings = [(s, corpus.CorpusReport()) for s in data.sources]
        placed = (corpus.documents(*_read_from(s), report, s.max_samples) for s, report in readings)
        texts = chain.from_iterable(texts_of(one.document) for one in chain.from_iterable(placed))
        sizes = sum(path.stat().st_size for s in data.sources for path in corpus.files(_paths(s), s.suffixes))

        def part() -> float:
            return min(sum(report.read for _, report in readings) / max(sizes, 1), 1.0)

        encoder = tokenizer.train_bpe(_counted(texts, progress, part), data.vocab_size, special)
        tokenizer.save(encoder, directory)
        template = template or ("chatml" if chats else None)
    if template is not None:
        text = _read_template(template)
        if template == "chatml":
            declared = tokenizer.special_tokens(directory).get("eos_token")
            end = tokenizer.end_of_text_token(encoder, declared=declared)
            text = chatml([t.content for t in encoder.get_added_tokens_decoder().values() if t.special], end)
        (directory / "chat_template.jinja").write_text(text, encoding="utf-8")


def _encoder(config: TrainConfig, directory: Path) -> DocumentEncoder:
    encoder = tokenizer.load(directory)
    text = tokenizer.chat_template(directory)
    template = None
    if text is not None:
        special = tokenizer.special_tokens(directory)
        template = ChatTemplate(text, special, config.data.train_on, config.data.template_arguments)
    return DocumentEncoder(encoder, tokenizer.end_id(encoder, directory), template)


def _template_text(config: TrainConfig, existing: Path | None, chats: bool) -> str | None:
    if config.data.chat_template is not None:
        return _read_template(config.data.chat_template)
    if existing is None:
        return CHATML if chats else None
    return tokenizer.chat_template(existing.parent)


def _read_template(name: str) -> str:
    if name == "chatml":
        return CHATML
    if "{%" in name or "{{" in name:
        return name
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"data.chat_template: {path} does not exist: give a template file, 'chatml', or the template itself"
        )
    return read_text(path, "give a Jinja template as data.chat_template")


def open_tokens(config: TrainConfig, directory: Path) -> PreparedCorpus:
    files = {name: TokenFile.open(directory / name) for name in _corpora(config.data)}
    evaluation = {name: files.pop(f"evaluation-{name}.bin") for name in config.data.evaluation}
    return PreparedCorpus(directory, tokenizer.load(directory), tuple(files.values()), evaluation)


def known_vocabulary(config: TrainConfig) -> tuple[int, int] | None:
    """Return the minimum vocabulary size and end-of-text id, or None if there is no tokenizer yet."""
    existing = _known_tokenizer(config)
    directory = _cache(config) / _key(config, existing)
    if _is_whole(directory, _corpora(config.data)):
        tokens = open_tokens(config, directory)
        return tokens.vocabulary, tokens.end_of_text
    if existing is None:
        return None
    encoder = tokenizer.load(existing)
    return vocabulary_of(encoder), tokenizer.end_id(encoder, existing.parent)


def verify(config: TrainConfig, directory: Path, progress: Progress | None = None) -> None:
    """Verify the token files; a ValueError names a damaged file."""
    report = progress or (lambda what, done, part: None)
    for name in _corpora(config.data):
        file = TokenFile.open(directory / name)

        def told(done: int, documents: int = len(file)) -> None:
            report("checking the token file", done, done / max(documents, 1))

        file.verify(told)


def _corpora(data: DataConfig) -> dict[str, tuple[str, SourceConfig]]:
    """Return (config field, settings) of each corpus, by the name of its token file."""
    corpora: dict[str, tuple[str, SourceConfig]] = {}
    for i, source in enumerate(data.sources):
        file = f"{_TOKENS}.bin" if len(data.sources) == 1 else f"{_TOKENS}-{i}.bin"
        corpora[file] = (f"data.mixture[{i}]" if data.mixture else "data.paths", source)
    for name, source in data.evaluation.items():
        corpora[f"evaluation-{name}.bin"] = (f"data.evaluation.{name}", source)
    return corpora


def _is_whole(directory: Path, names: Iterable[str]) -> bool:
    return all((directory / name).is_file() for name in names)


@contextmanager
def _alone(partial: Path) -> Iterator[None]:
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have moved the directory.
            if partial.exists() and os.path.samestat(os.fstat(lock), partial.stat()):
                yield
                return
        finally:
            os.close(lock)


def mini_batches(config: TrainConfig, tokens: PreparedCorpus, scores: Scores | None = None) -> Mixture:
    """Return an endless stream of mini-batches; raise ValueError for a document that `data.overlong` refuses."""
    # Every corpus is a stream; a mixture draws by `data.weights`.
    members = [_training_stream(config, i, file, "train") for i, file in enumerate(tokens.files)]
    for i, member in enumerate(members):
        member.scores = None if scores is None else scores[train_name(i)]
    return members[0] if len(members) == 1 else Mixture(members, config.data.weights, config.data.tokens_per_step)


def _stream(config: TrainConfig, source: SourceConfig, file: TokenFile, **split: Any) -> MiniBatches:
    data = config.data
    if data.overlong == "refuse":
        _refuse_overlong(data, source, file)
    overlong = "drop" if data.overlong == "drop" else "cut"
    pairs = config.objective is not None
    return MiniBatches(file, data.tokens_per_step, data.max_length, overlong=overlong, pairs=pairs, **split)


def _training_stream(config: TrainConfig, i: int, file: TokenFile, split: Split) -> MiniBatches:
    try:
        return _stream(config, config.data.sources[i], file, seed=config.seed, split=split, heldout=config.held_out)
    except ValueError as error:
        raise ValueError(f"data.mixture[{i}]: {error}" if config.data.mixture else str(error)) from None


def _refuse_overlong(data: DataConfig, source: SourceConfig, file: TokenFile) -> None:
    longer = (file.lengths > data.max_length).nonzero()[0]
    if len(longer):
        first = int(longer[0])
        placed = next(islice(corpus.documents(*_read_from(source)), first, None))
        raise ValueError(
            f"{placed.place}: {file.lengths[first]} tokens, but data.max_length is {data.max_length} "
            f"({len(longer)} of {len(file)} documents are too long): raise data.max_length, or set data.overlong to "
            "'cut' or 'drop'"
        )


def evaluation_batches(
    config: TrainConfig, tokens: PreparedCorpus, scores: Scores | None = None
) -> dict[str, list[list[Drawn]]]:
    batches_by_set: dict[str, list[list[Drawn]]] = {}
    for name, streams in evaluation_streams(config, tokens).items():
        for i, stream in enumerate(streams):
            stream.scores = None if scores is None else scores[evaluation_name(name, i)]
        passes = (islice(stream.single_pass(), config.evaluate_batches) for stream in streams)
        batches_by_set[name] = list(chain.from_iterable(passes))
    return batches_by_set


def evaluation_streams(config: TrainConfig, tokens: PreparedCorpus) -> dict[str, list[MiniBatches]]:
    streams: dict[str, list[MiniBatches]] = {}
    if config.held_out:
        streams["heldout"] = [_training_stream(config, i, file, "heldout") for i, file in enumerate(tokens.files)]
    for name, file in tokens.evaluation.items():
        streams[name] = [_stream(config, config.data.evaluation[name], file)]
    return streams


def steps_of(config: TrainConfig, batches: Mixture) -> int:
    """Return `steps`, or the number of mini-batches in `epochs`; this consumes the new stream `batches`."""
    if config.epochs is None:
        return config.steps
    steps = 0
    left = config.epochs * batches.tokens
    if left > _MOST_STEPS * config.data.tokens_per_step:
        raise ValueError(
            f"epochs is {config.epochs:g}, which takes {left / config.data.tokens_per_step:.0e} steps: lower epochs"
        )
    # `skip` returns a mini-batch's lengths without reading tokens.
    while left > 0:
        left -= sum(batches.skip())
        steps += 1
    return steps


def parts_of_epochs(batches: Mixture, parts: int, steps: int) -> frozenset[int]:
    """Divide each epoch into `parts` equal parts and return their last steps; this consumes the new `batches`."""
    complete = set[int]()
    drawn = 0
    for step in range(1, steps + 1) if parts else ():
        # With 1,000 tokens and 4 parts, part 1 ends at the first step with 250 drawn tokens.
        before = drawn * parts // batches.tokens
        drawn += sum(batches.skip())
        if drawn * parts // batches.tokens > before:
            complete.add(step)
    return frozenset(complete)


def stdlib_files(root: Path | None = None) -> list[Path]:
    folder = root or Path(sysconfig.get_path("stdlib"))
    entries = [e for e in sorted(folder.iterdir()) if e.name not in _NOT_STDLIB and not e.name.startswith((".", "__"))]
    sources = [e for e in entries if e.suffix == ".py" or (e.is_dir() and any(e.rglob("*.py")))]
    paths = corpus.files(sources, (".py",))
    return [path for path in paths if not set(path.relative_to(folder).parts) & set(_NOT_STDLIB)]


def _paths(source: SourceConfig) -> list[Path]:
    return [path for name in source.paths for path in (stdlib_files() if name == STDLIB else [Path(name)])]


def _read_from(source: SourceConfig) -> tuple[list[Path], tuple[str, ...] | None, FieldNames]:
    return _paths(source), source.suffixes, source


def _known_tokenizer(config: TrainConfig) -> Path | None:
    if config.data.tokenizer is not None:
        path = Path(config.data.tokenizer)
    elif config.model.directory is not None:
        path = Path(config.model.directory)
        if not (path / _TOKENIZER).is_file():
            raise ValueError(
                f"{config.model.directory_field} {path} holds no tokenizer.json: set data.tokenizer to a "
                "tokenizer.json or its directory"
            )
    else:
        return None
    file = path / _TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"data.tokenizer: {file} does not exist: name a tokenizer.json or a directory with one")
    return file


def _cache(config: TrainConfig) -> Path:
    return Path(config.data.cache) if config.data.cache is not None else Path(config.output) / "data"


def _key(config: TrainConfig, existing: Path | None) -> str:
    data = config.data
    how: list[str] = [f"vocab_size {data.vocab_size}"]
    if existing is not None:
        used = dict.fromkeys([existing, *tokenizer.files(existing.parent)])
        how = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in used]
    template = "" if data.chat_template is None else _read_template(data.chat_template)
    corpora = [
        # Without `max_samples`, keys equal older versions' keys.
        [name, corpus.fingerprint(*_read_from(source)), *([] if source.max_samples is None else [source.max_samples])]
        for name, (_, source) in _corpora(data).items()
    ]
    content = json.dumps([_ENCODING, corpora, how, template, data.train_on, dict(data.template_arguments)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _counted(texts: Iterable[str], progress: Progress, part: Callable[[], float]) -> Iterator[str]:
    count = 0
    for count, text in enumerate(texts, start=1):
        if count % 100 == 0:
            progress("training a tokenizer", count, part())
        yield text
    progress("training a tokenizer", count, 1.0)
    progress("computing the tokenizer's merges", 0, 0.0)
