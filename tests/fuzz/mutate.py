"""Ways to damage bytes, text and JSON.

Every choice is drawn from the `Random` that is passed in.
"""

from __future__ import annotations

import copy
import json
import struct
import zlib
from functools import cache
from random import Random
from typing import Any

INTEGERS = (
    0,
    1,
    2,
    7,
    8,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
)
WORDS = (
    "",
    " ",
    "0",
    "-1",
    "1e308",
    "1e999",
    "-0",
    "nan",
    "NaN",
    "inf",
    "-Infinity",
    "9" * 400,
    "0x10",
    "1_000",
    "١٢",
    "²",
    "null",
    "true",
    "keys",
    "query",
    "y",
    "set",
    "None",
    "..",
    "../outside/precious",
    "/etc/passwd",
    "a,b",
    "a\nb",
    "\x00",
    "\x1b[31m",
    "é",
    "\ud800",
    "𝒳",
    "%s%n",
    "{0}",
    "__class__",
    "x" * 5000,
    "'",
    '"',
    ";",
    ":",
    "?",
    "[bold]",
)
DEEP = "nested deeper than any reader goes"
NUMBERS: tuple[Any, ...] = (
    0,
    1,
    -1,
    2,
    3,
    10**6,
    2**31,
    2**62,
    2**63,
    10**30,
    0.5,
    -0.0,
    1e-300,
    1e150,
    1e308,
    float("nan"),
    float("inf"),
)


def damage(rng: Random, data: bytes) -> bytes:
    """One change of some bytes: bits, runs, numbers, ends."""
    raw = bytearray(data)
    if not raw:
        return bytes([rng.randrange(256)])
    at = _place(rng, len(raw))
    match rng.randrange(10):
        case 0:
            raw[at] ^= 1 << rng.randrange(8)
        case 1:
            for _ in range(rng.randint(2, 6)):
                raw[_place(rng, len(raw))] ^= 1 << rng.randrange(8)
        case 2:
            raw[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        case 3:
            size = rng.choice((2, 4, 8))
            number = _integer(rng) & (2 ** (8 * size) - 1)
            at -= at % rng.choice((1, size))
            raw[at : at + size] = number.to_bytes(size, "little")
        case 4:
            size = rng.choice((4, 8))
            at -= at % 4
            old = int.from_bytes(raw[at : at + size], "little")
            new = (old + rng.choice((-1, 1, 8, -8, old, 1 << rng.randrange(8 * size)))) % 2 ** (
                8 * size
            )
            raw[at : at + size] = new.to_bytes(size, "little")
        case 5:
            raw[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 64)))
        case 6:
            del raw[at : at + rng.choice((1, 2, 4, 8, 64, 512))]
        case 7:
            del raw[at:]
        case 8:
            size, to = rng.choice((1, 4, 8, 64)), rng.randrange(len(raw))
            raw[to : to + size] = raw[at : at + size]
        case _:
            raw[at : at + 8] = struct.pack("<d", float(rng.choice(NUMBERS)))
    return bytes(raw)


def _place(rng: Random, size: int) -> int:
    """Anywhere, and as often near the ends, where formats keep what they say about themselves."""
    reach = min(size, rng.choice((32, 256, 1024)))
    return rng.choice((rng.randrange(size), rng.randrange(reach), size - 1 - rng.randrange(reach)))


def _integer(rng: Random) -> int:
    return rng.choice(
        (rng.choice(INTEGERS), -rng.choice(INTEGERS), rng.getrandbits(rng.choice((8, 16, 32, 63))))
    )


def word(rng: Random) -> str:
    """A piece of text that somebody might not have thought of."""
    if rng.random() < 0.3:
        return str(rng.choice(NUMBERS))
    if rng.random() < 0.2:
        return "".join(
            chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x500))))
            for _ in range(rng.randint(1, 9))
        )
    return rng.choice(WORDS)


def retype(rng: Random, text: str, marks: str) -> str:
    """One change of some text: a line, a cell between ``marks``, a character."""
    at, kind = rng.randrange(len(text) + 1), rng.randrange(12)
    if kind == 0:
        return (
            text[:at]
            + rng.choice((word(rng), rng.choice(marks) * rng.choice((1, 300))))
            + text[at:]
        )[:60_000]
    if kind == 1:
        return text[:at] + text[at + rng.choice((1, 2, 20)) :]
    lines = text.split("\n")
    row = rng.randrange(len(lines))
    if kind == 2:
        lines.insert(row, rng.choice((rng.choice(lines), word(rng))))
        return "\n".join(lines)[:60_000]
    cells = _cells(lines[row], marks)
    cell, other = rng.randrange(len(cells)), rng.randrange(len(cells))
    match kind:
        case 3:
            del cells[cell]
        case 4:
            cells.insert(cell, rng.choice(marks) + word(rng))
        case 5:
            cells[cell], cells[other] = cells[other], cells[cell]
        case 6:
            cells[cell] += rng.choice((" ", ".", "e5", "e400", "-", "0" * 50, word(rng)))
        case _:
            cells[cell] = word(rng)
    lines[row] = "".join(cells)
    return "\n".join(lines)[:60_000]


def _cells(line: str, marks: str) -> list[str]:
    cells, current = [], ""
    for c in line:
        if c in marks:
            cells += [current, c]
            current = ""
        else:
            current += c
    return [*cells, current]


def encoded(rng: Random, text: str) -> bytes:
    """Text as bytes, mostly as it should be."""
    if rng.random() < 0.93:
        return text.encode("utf-8", "surrogatepass")
    encoding = rng.choice(("latin-1", "utf-16", "utf-8-sig", "utf-32"))
    return text.encode(encoding, "replace" if encoding == "latin-1" else "surrogatepass")


def twist(rng: Random, value: Any) -> Any:
    """A copy of some JSON with one change anywhere in it."""
    root = [copy.deepcopy(value)]
    holders = list(_holders(root))
    deep = [h for h in holders if h[0] is not root]
    holder, key = rng.choice(deep or holders)
    other_holder, other_key = rng.choice(holders)
    old = holder[key]
    match rng.randrange(9):
        case 0 | 1 | 2:
            holder[key] = _odd(rng, old)
        case 3 if holder is not root:
            del holder[key]
        case 4:
            holder[key] = copy.deepcopy(other_holder[other_key])
        case 5 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(old))
        case 6 if isinstance(holder, dict):
            holder[word(rng)] = holder.pop(key)
        case 7 if isinstance(old, list):
            holder[key] = [*old, _odd(rng, None)] if rng.random() < 0.5 else old[:-1]
        case _:
            holder[key] = _near(rng, old)
    return root[0]


def _holders(value: Any) -> Any:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in list(items):
        yield value, key
        yield from _holders(item)


def _odd(rng: Random, old: Any) -> Any:
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return word(rng)
    if kind == 2:
        return rng.choice((DEEP, [old], [[old]], [old], [old, old]))
    if kind == 3:
        return {"object": word(rng), "with": {}}
    return rng.choice((None, True, False, [], {}, 0, 1, -1, "", 0.5))


def _near(rng: Random, old: Any) -> Any:
    if isinstance(old, bool):
        return not old
    if isinstance(old, (int, float)):
        return rng.choice(
            (
                old + 1,
                old - 1,
                -old,
                old * 2,
                old * 10**6,
                float(old) if old < 1e300 else old,
                str(old),
            )
        )
    if isinstance(old, str):
        return rng.choice((old + "x", old[:-1], old.upper(), old * 2, word(rng)))
    return _odd(rng, old)


def text_of(value: Any) -> str:
    """JSON text of a value; where it says so, nested deeper than any reader goes."""
    return json.dumps(value, separators=(",", ":")).replace(
        f'"{DEEP}"', "[" * 20_000 + "]" * 20_000
    )


@cache
def zeros(size: int) -> bytes:
    """A raw deflate stream of ``size`` zero bytes, in whole MiB: a thousandth as long."""
    piece = bytes(2**20)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + again * (size // 2**20 - 1) + zlib.compressobj(9, zlib.DEFLATED, -15).flush()
