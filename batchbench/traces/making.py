"""Makes a row of a trace from a record of its file: the rules for what is dropped, noted and refused."""

from __future__ import annotations

from typing import Any

from batchbench.traces.cells import Clock, RefusedCell, is_empty, read_count, shown
from batchbench.traces.formats import AGENTIC, SESSION, Columns, Format, unit_of
from batchbench.traces.records import Record
from batchbench.traces.rows import Tally, TraceRow

EARLIER = "earlier than a row before"
SAME_TIME = "at the time of the row before"
DUPLICATE = "duplicate ids, of which the first keeps the name"
UNKNOWN_PARENT = "the turn before is not among the rows before"
NO_IDS = "no hash ids, so nothing is shared"
SHORT_IDS = "the last chunk has no hash id, so it is not shared"
EXTRA_ID = "one hash id beyond the prompt, left out"
TOKEN_IDS = "token ids, not used"
NOT_A_PERSON = "the first turn is not a person's"


class RowMaker:
    """Makes rows, in file order; keeps what it must know of the rows before.

    `make` returns a row, or the reason for which there is none. It raises RefusedCell.
    """

    def __init__(self, known: Format, columns: Columns, prefix_tokens: int | None, tally: Tally) -> None:
        self._columns, self._tally, self._note = columns, tally, tally.note
        self._prefix_tokens = prefix_tokens
        self._clock = Clock(unit_of(known, columns))
        self._agentic = known.name == "llmservingsim"
        self._ids: set[str] = set()
        self._latest: int | None = None
        self._before: int | None = None
        self.make = {"counts": self._counts, "conversations": self._conversation, "prompts": self._prompt}[known.kind]

    def _counts(self, line: int, record: Record) -> TraceRow | str:
        columns = self._columns
        if self._agentic:
            self._refuse_sessions(record)
        time, prompt, output = (
            record.get(columns.arrival or ""),
            record.get(columns.prompt),
            record.get(columns.output or ""),
        )
        for cell, what in ((time, "time"), (prompt, "prompt length"), (output, "output length")):
            if is_empty(cell):
                return f"no {what}"
        prompt_tokens = read_count(prompt, "prompt length", self._note)
        output_tokens = read_count(output, "output length", self._note)
        arrival_ns = self._clock.read(time, self._note)
        if prompt_tokens == 0 or output_tokens == 0:
            return f"{'prompt' if prompt_tokens == 0 else 'output'} of 0 tokens"
        prefix_ids = self._prefix_ids(record, prompt_tokens)
        self._compare(arrival_ns)
        after = self._after(record)
        return TraceRow(line, arrival_ns, prompt_tokens, output_tokens, prefix_ids, self._name(record), after)

    def _refuse_sessions(self, record: Record) -> None:
        if SESSION in record:
            raise RefusedCell(AGENTIC)
        if "input_tok_ids" in record or "output_tok_ids" in record:
            self._note(TOKEN_IDS)

    def _compare(self, arrival_ns: int) -> None:
        if self._latest is not None and arrival_ns < self._latest:
            self._note(EARLIER)
        elif arrival_ns == self._before:
            self._note(SAME_TIME)
        self._before = arrival_ns
        self._latest = arrival_ns if self._latest is None else max(self._latest, arrival_ns)

    def _name(self, record: Record) -> str | None:
        """The row's id; None if it has none, or an earlier row has the same."""
        given = record.get(self._columns.request_id or "")
        if is_empty(given):
            return None
        name = _text_id(given, "id")
        if name in self._ids:
            self._note(DUPLICATE)
            return None
        self._ids.add(name)
        return name

    def _after(self, record: Record) -> str | None:
        given = record.get(self._columns.after or "")
        if is_empty(given) or given in (-1, "-1"):
            return None
        name = _text_id(given, "id of the turn before")
        if name not in self._ids:
            self._note(UNKNOWN_PARENT)
        return name

    def _prefix_ids(self, record: Record, prompt_tokens: int) -> tuple[int | str, ...]:
        if self._columns.hash_ids is None:
            return ()
        given = record.get(self._columns.hash_ids)
        if is_empty(given) or given == []:
            self._note(NO_IDS)
            return ()
        if not isinstance(given, list) or not all(type(one) is int or type(one) is str for one in given):
            raise RefusedCell(f"hash ids are {shown(given)}, must be a list of whole numbers or texts")
        size = self._prefix_tokens
        if size is None:
            raise RefusedCell("there are hash ids, but nothing says of how many positions each is; give prefix_tokens")
        whole, rest = divmod(prompt_tokens, size)
        chunks = whole + (rest > 0)
        if len(given) == chunks - 1 == whole:
            self._note(SHORT_IDS)
        elif len(given) != chunks:
            fitting = fitting_sizes(prompt_tokens, len(given))
            if len(given) != chunks + 1 or (fitting and _power_of_two(fitting)):
                raise RefusedCell(_contradiction(prompt_tokens, len(given), size, chunks, fitting))
            self._note(EXTRA_ID)
        return tuple(given[:chunks])

    def _conversation(self, line: int, record: Record) -> TraceRow | str:
        turns = record.get(self._columns.prompt)
        if is_empty(turns):
            return "no conversation"
        if not isinstance(turns, list):
            raise RefusedCell(f"conversations is {shown(turns)}, must be a list of turns")
        if len(turns) < 2:
            return "fewer than two turns"
        prompt, output = (_turn(turn) for turn in turns[:2])
        if is_empty(prompt) or is_empty(output):
            return f"an empty {'prompt' if is_empty(prompt) else 'output'}"
        _require_characters(prompt or "", output or "")
        if turns[0].get("from", "human") not in ("human", "user"):
            self._note(NOT_A_PERSON)
        return TraceRow(line, None, None, None, request_id=self._name(record), prompt=prompt, output=output)

    def _prompt(self, line: int, record: Record) -> TraceRow | str:
        prompt, output = record.get(self._columns.prompt), record.get(self._columns.output or "")
        if is_empty(prompt):
            return "an empty prompt"
        if type(prompt) is not str:
            raise RefusedCell(f"prompt is {shown(prompt)}, must be a text")
        _require_characters(prompt)
        output_tokens = None if is_empty(output) else read_count(output, "output length", self._note)
        if output_tokens == 0:
            return "output of 0 tokens"
        return TraceRow(line, None, None, output_tokens, prompt=prompt)


def _require_characters(*texts: str) -> None:
    """Raise RefusedCell for half a surrogate pair, which JSON can say and no tokenizer takes."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RefusedCell(f"its text has half a surrogate pair at character {error.start}") from None


def fitting_sizes(prompt_tokens: int, ids: int) -> range:
    """The sizes of chunk, in positions, of which a prompt has exactly that many; an empty range if none."""
    return range(-(-prompt_tokens // ids), prompt_tokens + 1 if ids == 1 else -(-prompt_tokens // (ids - 1)))


def _power_of_two(sizes: range) -> int | None:
    """One in the range, which a chunk's size usually is."""
    power = 1 << (sizes.start - 1).bit_length()
    return power if power in sizes else None


def _contradiction(prompt_tokens: int, ids: int, size: int, chunks: int, fitting: range) -> str:
    said = f"{ids} hash ids for a prompt of {prompt_tokens}; of {size} positions each there would be {chunks}"
    if not fitting:
        return f"{said}; no size fits"
    one = fitting.start if len(fitting) == 1 else _power_of_two(fitting)
    exact = f"from {fitting.start} up" if ids == 1 else f"from {fitting.start} to {fitting[-1]}"
    return f"{said}; prefix_tokens {exact if one is None or ids == 1 else f'= {one}'} would fit"


def _text_id(given: Any, what: str) -> str:
    if type(given) is not int and type(given) is not str:
        raise RefusedCell(f"{what} is {shown(given)}, must be a whole number or a text")
    return str(given).strip()


def _turn(turn: Any) -> str | None:
    """What is said in a turn; None if it has no text."""
    if not isinstance(turn, dict):
        raise RefusedCell(f"a turn is {shown(turn)}, must be an object")
    said = turn.get("value")
    if said is not None and type(said) is not str:
        raise RefusedCell(f"a turn's value is {shown(said)}, must be a text")
    return said
