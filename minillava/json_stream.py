"""A JSON list, or JSON lines, of any length, read one element at a time.

What a download cut short, an editor saved in another encoding, or nobody meant to be JSON, is told apart and named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

CHUNK = 1 << 20  # characters read at a time
LONGEST = 1 << 24  # characters of one element: beyond that, the JSON is broken


def records(file: Path) -> Iterator[object]:
    """Each element of a JSON file; one at a time is held in memory.

    What is not JSON comes as the ValueError that says so: of JSON lines the next line follows it, in a list nothing
    does. Bytes that are not UTF-8 come as lone surrogates, so that the element they are in can be named.
    """
    with open(file, encoding="utf-8-sig", errors="surrogateescape") as stream:
        first = stream.read(1)
        while first.isspace():
            first = stream.read(1)
        if first == "[":
            yield from _elements(stream)
        else:
            stream.seek(0)
            yield from _lines(stream)


def _elements(stream: TextIO) -> Iterator[object]:
    """The elements of a JSON list whose bracket has been read."""
    decode = json.JSONDecoder().raw_decode
    text, at, size, count = "", 0, CHUNK, 0
    while True:
        try:
            at = skip_space(text, at)
            if count == 0 and text[at] == "]":
                return
            record, end = decode(text, at)
            end = skip_space(text, end)
            mark = text[end]
            if mark not in ",]":  # a number that goes on, perhaps
                raise ValueError("neither a comma nor the end of the list")
        except (ValueError, IndexError, RecursionError) as error:  # broken, or only cut off by the end of `text`?
            more = stream.read(size) if len(text) - at < LONGEST else ""
            if not more:
                yield ValueError(f"not JSON ({_reason(error)}), nothing after it was read")
                return
            text, at, size = text[at:] + more, 0, 2 * size
            continue
        yield record
        at, size, count = end + 1, CHUNK, count + 1
        if mark == "]":
            if (text[at:] + stream.read(CHUNK)).strip():
                yield ValueError("not JSON (the list ends, and something follows), nothing after it was read")
            return


def _lines(stream: TextIO) -> Iterator[object]:
    """JSON lines; empty ones are left out. If the first is broken or one is endless, the rest is no JSON either."""
    count = 0
    while line := stream.readline(LONGEST):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            stop = count == 0 or len(line) == LONGEST
            yield ValueError(f"not JSON ({_reason(error)})" + ", nothing after it was read" * stop)
            if stop:
                return
        count += 1


def _reason(error: Exception) -> str:
    if isinstance(error, IndexError):
        return "the file ends too early"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return error.msg.lower() if isinstance(error, json.JSONDecodeError) else str(error)


def skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\n\r":
        at += 1
    return at
