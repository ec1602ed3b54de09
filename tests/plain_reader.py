"""A reader in plain Python, written from docs/format.md and docs/sections.md alone: it proves that the pages suffice.

Simple and slow, and it knows nothing of the package. numpy only lends pcodec its buffers.
"""

import bisect
import math
import struct
import zlib
from collections import Counter
from functools import partial
from math import inf
from typing import NamedTuple


class Refused(ValueError):
    """Bytes that are no message."""


def must(condition, what):
    if not condition:
        raise Refused(what)


# Bytes and bits


class Bytes:
    """Bytes, read from the front."""

    def __init__(self, data):
        self.data, self.at = bytes(data), 0

    def left(self):
        return len(self.data) - self.at

    def take(self, size):
        must(size <= self.left(), f"{size} bytes wanted, {self.left()} are left")
        self.at += size
        return self.data[self.at - size : self.at]

    def byte(self):
        return self.take(1)[0]

    def varint(self):
        number = 0
        for place in range(10):
            byte = self.byte()
            number |= (byte & 127) << 7 * place
            if byte < 128:
                must(number < 2**63 and (byte or not place), "a number that is too large or not in its shortest form")
                return number
        raise Refused("a number of more than 10 bytes")

    def text(self):
        try:
            return self.take(self.varint()).decode()
        except UnicodeDecodeError:
            raise Refused("a text that is not UTF-8") from None

    def floats(self, code, count):
        size = struct.calcsize("<" + code)
        return [struct.unpack("<" + code, self.take(size))[0] for _ in range(count)]

    def end(self):
        must(not self.left(), f"{self.left()} bytes too many")


class Bits:
    """The stream of bits that begins at the next byte."""

    def __init__(self, part):
        self.part, self.byte, self.count = part, 0, 0

    def bit(self):
        if not self.count:
            self.byte, self.count = self.part.byte(), 8
        bit, self.byte = self.byte & 1, self.byte >> 1
        self.count -= 1
        return bit

    def number(self, width):
        return sum(self.bit() << i for i in range(width))

    def only_padding_is_left(self):
        return not self.part.left() and not self.byte

    def end(self):
        must(not self.byte, "padding that is not zero")


def packed(part, width, count):
    bits = Bits(part)
    numbers = [bits.number(width) for _ in range(count)]
    bits.end()
    return numbers


# The message


class Tensor(NamedTuple):
    """One tensor: increasing positions, and the little-endian bytes of the value at each."""

    shape: tuple
    dtype: str
    positions: list
    values: list

    def dense(self):
        """The bytes of the dense tensor."""
        size = ITEM_BYTES[self.dtype]
        out = bytearray(size * math.prod(self.shape))
        for position, value in zip(self.positions, self.values, strict=True):
            out[size * position : size * (position + 1)] = value
        return bytes(out)


DTYPES = ("float16", "bfloat16", "float32", "float64")
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def read(blob, max_numel=2**28):
    """All tensors of a message by name; the name is None where there is only one, without a name."""
    start = Bytes(blob)
    must(start.take(3) == b"\x9dDR", "the magic is another one")
    must(start.byte() == 1, "another version")
    must(start.varint() == start.left(), "not one whole message")
    must(start.left() >= 4, "no checksum")
    must(zlib.crc32(blob[:-4]) == int.from_bytes(blob[-4:], "little"), "the checksum does not match")
    body = Bytes(start.take(start.left() - 4))
    coded_size = body.varint()
    header = body.take(coded_size // 2)
    heads = read_header(Bytes(inflated(header) if coded_size % 2 else header), max_numel)
    tensors = {name: read_tensor(body, *head) for name, head in heads.items()}
    body.end()
    return tensors


def inflated(data, window=zlib.MAX_WBITS, limit=2**24):
    engine = zlib.decompressobj(window)
    try:
        found = engine.decompress(data, limit + 1)
    except zlib.error as error:
        raise Refused(str(error)) from None
    must(engine.eof and not engine.unused_data and len(found) <= limit, "a stream that does not end where it should")
    return found


def read_header(header, max_numel):
    kind = header.byte()
    must(kind in (0, 1), "an unknown kind")
    layouts = [read_layout(header) for _ in range(header.varint())]
    names = [header.text() for _ in range(header.varint())] if kind else [None]
    must(len(set(names)) == len(names), "two tensors of one name")
    heads, numel = {}, 0
    for name in names:
        number = header.varint()
        must(number < len(layouts), "a layout that is not there")
        dimensions = header.varint()
        must(dimensions <= 32, "too many dimensions")
        shape = tuple(header.varint() for _ in range(dimensions))
        numel += math.prod(max(n, 1) for n in shape)
        must(numel <= max_numel, "too many elements")
        nnz = header.varint()
        must(nnz <= math.prod(shape), "more values than elements")
        heads[name] = (layouts[number], shape, nnz, [header.varint() for _ in range(3)])
    header.end()
    return heads


def read_layout(header):
    code = header.byte()
    must(code < len(DTYPES), "an unknown dtype")
    must(header.byte() in SPARSIFIERS, "an unknown sparsifier")
    header.text()
    return DTYPES[code], read_codec(header, INDICES), read_codec(header, VALUES)


def read_codec(header, table):
    wire_id, arguments = header.byte(), header.text()
    must(wire_id in table, "an unknown codec")
    decode, *kinds = table[wire_id]
    texts = arguments.split(",") if arguments else []
    must(len(texts) == len(kinds), "another number of parameters")
    try:
        parameters = [kind(text) for kind, text in zip(kinds, texts, strict=True)]
    except ValueError:
        raise Refused(f"parameters {arguments!r}") from None
    return lambda part, nnz, what: decode(part, nnz, what, *parameters)


def read_tensor(body, layout, shape, nnz, sizes):
    dtype, decode_index, decode_value = layout
    index_part, order_part, value_part = (Bytes(body.take(size)) for size in sizes)
    numel = math.prod(shape)
    positions = decode_index(index_part, nnz, numel)
    values = decode_value(value_part, nnz, dtype)
    places = read_order(order_part, nnz)
    for part in (index_part, order_part, value_part):
        part.end()
    must(len(positions) == len(values) == len(set(positions)) == nnz, "positions that repeat")
    must(all(position < numel for position in positions), "a position outside")
    by_position = sorted((positions[place], value) for place, value in zip(places, values, strict=True))
    return Tensor(shape, dtype, [position for position, _ in by_position], [value for _, value in by_position])


def read_order(part, nnz):
    if not part.left():
        return range(nnz)
    block = part.varint()
    must(1 <= block <= nnz, "a block that cannot be")
    entries = packed(part, (block - 1).bit_length(), nnz)
    places = [i - i % block + entry for i, entry in enumerate(entries)]
    must(sorted(places) == list(range(nnz)), "an order that is no permutation")
    return places


# Random numbers

U64 = 2**64 - 1


def mix(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & U64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & U64
    return x ^ x >> 31


def state(seed, stream):
    return mix(mix(seed + 0x9E3779B97F4A7C15 & U64) ^ (stream * 0xBF58476D1CE4E5B9 & U64))


def number(state, i):
    return mix(state + (i + 1) * 0x9E3779B97F4A7C15 & U64)


def below(state, i, limit):
    return math.floor((number(state, i) >> 11) * 2.0**-53 * float(limit))


# Rice lists, Huffman codes, pcodec streams


def rice_list(part, count):
    first = part.byte()
    if first < 64:
        block, parameters = count, [first]
    else:
        must(first - 64 in (5, 6, 8, 10), "a block size that cannot be")
        block = 2 ** (first - 64)
        parameters = packed(part, 6, -(-count // block))
    must(max(parameters) <= 56, "a Rice parameter that is too large")
    must(count <= 8 * part.left(), "more numbers than bits")
    bits = Bits(part)
    low = [bits.number(parameters[i // block]) for i in range(count)]
    numbers = [unary(bits) << parameters[i // block] | low[i] for i in range(count)]
    bits.end()
    return numbers


def unary(bits):
    zeros = 0
    while not bits.bit():
        zeros += 1
    return zeros


class Code:
    """A canonical Huffman code."""

    def __init__(self, lengths):
        used = [length for length in lengths if length]
        full = max(used, default=0) <= 16 and sum(2**-length for length in used) == 1
        must(full or used == [1], "lengths that make no code")
        self.symbols, code = {}, 0
        for length in range(1, 17):
            for symbol, its_length in enumerate(lengths):
                if its_length == length:
                    self.symbols[length, code] = symbol
                    code += 1
            code *= 2

    def symbol(self, bits):
        code = 0
        for length in range(1, 17):
            code = 2 * code + bits.bit()
            if (length, code) in self.symbols:
                return self.symbols[length, code]
        raise Refused("bits that begin no word")


def read_lengths(part, symbols):
    table = Bytes(part.take(part.varint()))
    bits, lengths, length = Bits(table), [], 0
    while len(lengths) < symbols and not bits.only_padding_is_left():
        width = unary(bits)
        must(width <= 5, "a difference of lengths that is too large")
        folded = 2**width + bits.number(width)
        length += folded // 2 if folded % 2 == 0 else -(folded // 2)
        must(0 <= length <= 16, "a length that cannot be")
        lengths.append(length)
    bits.end()
    table.end()
    return lengths + [0] * (symbols - len(lengths))


def lengths_from_counts(counts):
    lengths = [0] * len(counts)
    rising = sorted((count, symbol) for symbol, count in enumerate(counts) if count)
    if len(rising) < 2:
        for _, symbol in rising:
            lengths[symbol] = 1
        return lengths
    levels = [[]]
    for _ in range(12):
        below_it = [weight for weight, _ in levels[-1]]
        pairs = [below_it[i] + below_it[i + 1] for i in range(0, len(below_it) - 1, 2)]
        items = [(count, False) for count, _ in rising] + [(pair, True) for pair in pairs]
        levels.append(sorted(items))  # False comes before True
    taken = 2 * len(rising) - 2
    for level in reversed(levels):
        pairs = sum(is_pair for _, is_pair in level[:taken])
        for _, symbol in rising[: taken - pairs]:
            lengths[symbol] += 1
        taken = 2 * pairs
    return lengths


def pcodec_stream(part, kind, count, first_byte=b""):
    """The bytes of the numbers."""
    import numpy as np
    from pcodec.wrapped import FileDecompressor

    try:
        file, _ = FileDecompressor.new(part.take(2))
    except RuntimeError as error:
        raise Refused(str(error)) from None
    out = b""
    for start in range(0, count, 2**18):
        numbers = np.empty(min(2**18, count - start), f"<{kind[0]}{int(kind[1:]) // 8}")
        chunk = part.take(part.varint())
        must(chunk.startswith(first_byte), "a chunk of another mode")
        try:
            decompressor, meta_bytes = file.chunk_decompressor(chunk, kind)
            progress, page_bytes = decompressor.read_page_into(chunk[meta_bytes:], numbers.size, numbers)
        except RuntimeError as error:
            raise Refused(str(error)) from None
        must(progress.n_processed == numbers.size and meta_bytes + page_bytes == len(chunk), "a chunk that is not used up")
        out += numbers.tobytes()
    return out


# Index codecs: (part, nnz, numel, *parameters) -> positions


def after_gaps(gaps):
    positions, before = [], -1
    for gap in gaps:
        before += 1 + gap
        positions.append(before)
    return positions


def gap_codec(read_gaps):
    def positions(part, nnz, numel):
        must(numel <= 2**56, "a tensor too large for gaps")
        return after_gaps(read_gaps(part, nnz, numel)) if 0 < nnz < numel else list(range(nnz))

    return positions


def key_bytes(numel):
    return 4 if numel <= 2**32 else 8


def raw_index(part, nnz, numel):
    return [int.from_bytes(part.take(key_bytes(numel)), "little") for _ in range(nnz)]


def bitmap(part, nnz, numel):
    flags = packed(part, 1, numel)
    must(sum(flags) == nnz, "another number of bits is set")
    return [position for position, flag in enumerate(flags) if flag]


def all_positions(part, nnz, numel):
    must(nnz == numel, "not all positions")
    return list(range(numel))


def seeded(part, nnz, numel):
    start, drawn = state(part.varint(), 1), set()
    for j in range(numel - nnz, numel):
        pick = below(start, j, j + 1)
        drawn.add(j if pick in drawn else pick)
    return sorted(drawn)


def rle_gaps(part, nnz, numel):
    unit = part.varint()
    must(unit >= 1 and nnz % unit == 0, "a unit that cannot be")
    runs = part.varint()
    must(1 <= runs <= nnz, "a number of runs that cannot be")
    zeros, ones = rice_list(part, runs), rice_list(part, runs)
    must(unit * sum(length + 1 for length in ones) == nnz, "runs of another number of positions")
    gaps = []
    for run in range(runs):
        gaps += [(zeros[run] + (run > 0)) * unit] + [0] * ((ones[run] + 1) * unit - 1)
    return gaps


def huffman(part, nnz, numel):
    counts = [0] * 256
    for place in range(key_bytes(numel)):
        run = 256**place
        rounds, left = divmod(numel, 256 * run)
        for byte in range(256):
            counts[byte] += rounds * run + min(max(left - byte * run, 0), run)
    excess = max((numel * key_bytes(numel)).bit_length() - 48, 0)
    counts = [-(-count // 2**excess) for count in counts]
    if not nnz:
        return []
    code, bits = Code(lengths_from_counts(counts)), Bits(part)
    keys = [sum(code.symbol(bits) << 8 * place for place in range(key_bytes(numel))) for _ in range(nnz)]
    bits.end()
    return keys


def delta_gaps(part, nnz, numel):
    bits, width_bits = Bits(part), (numel - 1).bit_length().bit_length()
    widths = [bits.number(width_bits) for _ in range(0, nnz, 64)]
    must(max(widths) <= 56, "a width that is too large")
    gaps = [bits.number(widths[i // 64]) for i in range(nnz)]
    bits.end()
    return gaps


def deltahuffman_gaps(part, nnz, numel):
    finer = part.byte()
    must(finer <= 4, "prefixes that are too fine")
    code = Code(read_lengths(part, (64 - finer) * 2**finer))
    bits, gaps = Bits(part), []
    for _ in range(nnz):
        symbol = code.symbol(bits)
        rest = max((symbol >> finer) - 1, 0)
        gaps.append(((symbol - (rest << finer)) << rest) + bits.number(rest))
    bits.end()
    return gaps


def rice_gaps(part, nnz, numel):
    return rice_list(part, nnz)


def pco_index(part, nnz, numel):
    if not nnz:
        return []
    width = part.byte()
    must(width in (2, 4, 8), "gaps of another width")
    numbers = pcodec_stream(part, f"u{8 * width}", nnz, b"\x00")
    return after_gaps(int.from_bytes(numbers[i : i + width], "little") for i in range(0, len(numbers), width))


def bloom(part, nnz, numel, policy, fpr):
    seed, hashes = part.varint(), part.byte()
    must(1 <= hashes <= 50, "a number of hashes that cannot be")
    size_bytes = part.varint()
    must(size_bytes < 2**29, "a filter that is too large")
    bits = int.from_bytes(part.take(size_bytes), "little")
    salt, steps = state(seed, 4), [pow(0xD1342543DE82EF95, j, 2**64) for j in range(hashes)]

    def probes(position):
        hashed = number(salt, position)
        return [((hashed * step & U64) >> 32) * 8 * size_bytes >> 32 for step in steps]

    positives = [p for p in range(numel) if all(bits >> bit & 1 for bit in probes(p))] if size_bytes else []
    must(len(positives) >= nnz, "too few positives")
    return POLICIES[policy](positives, nnz, probes, state(seed, 3))


def everything(positives, nnz, probes, start):
    must(len(positives) == nnz, "too many positives")
    return positives


def leftmost(positives, nnz, probes, start):
    return positives[:nnz]


def middle(positives, nnz, probes, start):
    first = (len(positives) - nnz) // 2
    return positives[first : first + nnz]


def rightmost(positives, nnz, probes, start):
    return positives[len(positives) - nnz :]


def some(positives, nnz, probes, start):
    taken = []
    for i, position in enumerate(positives):
        if below(start, i, len(positives) - i) < nnz - len(taken):
            taken.append(position)
    return taken


def by_conflict_sets(positives, nnz, probes, start, most=255):
    if nnz == len(positives):
        return positives
    bits_of = {position: set(probes(position)) for position in positives}
    sizes = Counter(bit for bits in bits_of.values() for bit in bits)
    certain = [position for position in positives if any(sizes[bit] == 1 for bit in bits_of[position])]
    if len(certain) >= nnz:
        return certain[:nnz]
    taken = set(certain)
    sets = {bit: [] for bit in sorted(sizes, key=lambda bit: (min(sizes[bit], most), bit))}
    for position in positives:
        if position not in taken:
            for bit in bits_of[position]:
                sets[bit].append(position)
    draws = 0
    while len(taken) < nnz:
        for items in sets.values():
            given = False
            while items and not given and len(taken) < nnz:
                pick = below(start, draws, len(items))
                draws += 1
                item, items[pick] = items[pick], items[-1]
                items.pop()
                given = item not in taken
                taken.add(item)
    return sorted(taken)


POLICIES = {
    "naive": leftmost,
    "p0": everything,
    "p1": some,
    "p2": by_conflict_sets,
    "leftmost": leftmost,
    "middle": middle,
    "rightmost": rightmost,
    "p2exact": partial(by_conflict_sets, most=inf),
}


# Tables


class RangeDecoder:
    """The choices that a range coder has written."""

    def __init__(self, data):
        self.data, self.used = data, 8
        self.code, self.range = int.from_bytes(data[:8].ljust(8, b"\0"), "big"), U64

    def target(self, bits):
        target = self.code // (self.range >> bits)
        must(target < 2**bits, "a part that is not in the range")
        return target

    def follow(self, bits, start, parts):
        unit = self.range >> bits
        self.code -= start * unit
        self.range = parts * unit
        while self.range < 2**56:
            self.code = self.code * 256 + (self.data[self.used] if self.used < len(self.data) else 0)
            self.range *= 256
            self.used += 1
        must(self.used <= len(self.data) + 6, "a table that goes on after the last byte")

    def end(self):
        must(self.used == len(self.data) + 6 and self.code < 2**48, "another end of a table")


class LineCounts:
    """How many elements of each line are kept, as numbers that adaptive choices of two make up."""

    def __init__(self, decoder):
        self.decoder, self.before = decoder, 0
        self.cells = {}

    def bit(self, context, length, node):
        cells = [self.cells.setdefault((which, length, node), [2**15, 0]) for which in (0, context)]
        (general, _), (special, asked) = cells
        ones = general + ((special - general) * (256 * asked // (asked + 8)) >> 8)
        ones = min(max(ones, 32), 2**16 - 32)
        bit = int(self.decoder.target(16) < ones)
        self.decoder.follow(16, *((0, ones) if bit else (ones, 2**16 - ones)))
        for cell in cells:
            chance, asked = cell
            cell[:] = chance + ((bit * 65535 - chance) * (2**17 // (2 * asked + 3)) >> 16), min(asked + 1, 254)
        return bit

    def next(self):
        context = 1 + min(self.before, 2 + (self.before >> 2).bit_length(), 7)
        length = 0
        while self.bit(context, length, 0):
            length += 1
            must(length <= 20, "a line that is too full")
        count = min(length, 1)
        for place in range(length - 2, -1, -1):
            count = 2 * count + self.bit(context, length, count if count < 4 else 4 + place)
        self.before = count
        return count


class Weights:
    """What was learned of the elements of a line."""

    def __init__(self, width):
        self.seen, self.all, self.new = [0] * width, 0, 0
        self.make()

    def make(self):
        self.sums, self.new = [0], 0
        for seen in reversed(self.seen):
            self.sums.append(self.sums[-1] + 4 * seen + 1)
        self.sums.reverse()
        if self.sums[0] > 2**28:
            self.seen = [seen // 2 for seen in self.seen]

    def learn(self, elements):
        for element in elements:
            self.seen[element] += 1
        self.all += len(elements)
        self.new += len(elements)
        if self.new > 0 and 4 * self.new >= min(len(self.seen), self.all) and 16 * self.new >= self.all:
            self.make()

    def starts(self, first, left, steps):
        """The first part of the element so many steps after the first."""
        others = self.sums[first] * (left - 1) // (2 * (len(self.seen) - first))
        inverse = 2**62 // (self.sums[first] - others)

        def start(step):
            if step in (0, steps):
                return 2**28 if step else 0
            fraction = max(self.sums[first + step] - others, 0) * inverse >> 30
            return ((2**32 - power(fraction, left)) * (2**28 - steps) >> 32) + step

        return start


def power(fraction, exponent):
    product = 2**32
    while exponent > 1:
        if exponent % 2:
            product = product * fraction >> 32
        fraction = fraction * fraction >> 32
        exponent //= 2
    return product * fraction >> 32


def read_line(decoder, weights, count):
    elements, first = [], 0
    for left in range(count, 0, -1):
        steps = len(weights.seen) - first - left + 1
        step = 0
        if steps > 1:
            start, target = weights.starts(first, left, steps), decoder.target(28)
            step = bisect.bisect_right(range(1, steps), target, key=start)
            decoder.follow(28, start(step), start(step + 1) - start(step))
        elements.append(first + step)
        first += step + 1
    return elements


def shaped(part, nnz, numel):
    if nnz in (0, numel):
        return list(range(nnz))
    columns, turned = divmod(part.varint(), 2)
    must(columns >= 1, "a table without columns")
    rows = -(-numel // columns)
    lines, width = (columns, rows) if turned else (rows, columns)
    must(max(rows, columns) <= 4096 + 64 * nnz and width < 2**20, "a table that is too large")
    decoder = RangeDecoder(part.take(part.left()))
    counts, weights, positions = LineCounts(decoder), Weights(width), []
    for line in range(lines):
        count = counts.next()
        must(count <= min(width, nnz - len(positions)), "a line that is too full")
        elements = read_line(decoder, weights, count)
        weights.learn(elements)
        positions += [element * columns + line if turned else line * columns + element for element in elements]
    decoder.end()
    must(len(positions) == nnz, "lines of another number of positions")
    return sorted(positions)


# Value codecs: (part, nnz, dtype, *parameters) -> the bytes of each value


def rounded(value, dtype):
    """The little-endian bytes of the nearest number of this dtype."""
    if dtype == "bfloat16":
        bits = int.from_bytes(rounded(value, "float32"), "little")
        if value != value:
            return b"\xc0\x7f"
        return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).to_bytes(2, "little")
    code = {"float16": "<e", "float32": "<f", "float64": "<d"}[dtype]
    try:
        return struct.pack(code, value)
    except OverflowError:
        return struct.pack(code, math.copysign(math.inf, value))


def widened(data, dtype):
    """The float of the little-endian bytes of one number."""
    if dtype == "bfloat16":
        return struct.unpack("<f", b"\0\0" + data)[0]
    return struct.unpack({"float16": "<e", "float32": "<f", "float64": "<d"}[dtype], data)[0]


def raw_value(part, nnz, dtype):
    return [part.take(ITEM_BYTES[dtype]) for _ in range(nnz)]


def fp16(part, nnz, dtype):
    return [rounded(widened(part.take(2), "float16"), dtype) for _ in range(nnz)]


def bf16(part, nnz, dtype):
    return [rounded(widened(part.take(2), "bfloat16"), dtype) for _ in range(nnz)]


def deflate(part, nnz, dtype, level, shuffle):
    size = ITEM_BYTES[dtype]
    data = inflated(part.take(part.left()), -zlib.MAX_WBITS, nnz * size)
    must(len(data) == nnz * size, "another number of bytes")
    if shuffle is not False:
        return [data[i::nnz] for i in range(nnz)]
    return [data[i * size : (i + 1) * size] for i in range(nnz)]


def pco_value(part, nnz, dtype, level):
    kind = {"float16": "f16", "bfloat16": "u16", "float32": "f32", "float64": "f64"}[dtype]
    return raw_value(Bytes(pcodec_stream(part, kind, nnz) if nnz else b""), nnz, dtype)


def qsgd(part, nnz, dtype, bits, group, norm):
    norms = part.floats("f", -(-nnz // group))
    must(all(0 <= norm < math.inf for norm in norms), "a norm that cannot be")
    levels, values = 2 ** (bits - 1) - 1, []
    for i, code in enumerate(packed(part, bits, nnz)):
        step = norms[i // group] / levels
        value = (-1.0 if code >> bits - 1 else 1.0) * (step * (code & levels))
        if dtype != "float64":
            value = widened(rounded(value, "float32"), "float32")
        values.append(rounded(value, dtype))
    return values


def sketch(part, nnz, dtype, bits, huffman, groups, rows, columns):
    must(not groups or (2 <= groups <= 2 ** (bits - 1) and groups.bit_count() == 1 and not huffman), "groups that cannot be")
    bins = 2**bits
    mean_dtype = dtype if ITEM_BYTES[dtype] == 2 else "float32"
    means = [widened(part.take(ITEM_BYTES[mean_dtype]), mean_dtype) for _ in range(bins)]
    must(all(math.isfinite(mean) for mean in means), "a mean that is not finite")
    if groups:
        numbers = grouped(part, nnz, bins // groups, groups, rows, columns)
    elif huffman:
        code, stream = Code(read_lengths(part, bins)), Bits(part)
        numbers = [code.symbol(stream) for _ in range(nnz)]
        stream.end()
    else:
        numbers = packed(part, bits, nnz)
    return [rounded(means[i], dtype) for i in numbers]


def lloyd(part, nnz, dtype, bits):
    return sketch(part, nnz, dtype, bits, False, 0, 0, 0)


def grouped(part, nnz, size, groups, rows, columns):
    group_of = packed(part, groups.bit_length() - 1, nnz)
    widths = [math.ceil(float(group_of.count(group)) * columns) for group in range(groups)]
    cells = packed(part, size.bit_length() - 1, rows * sum(widths))
    start, numbers = state(0, 4), []
    for i, group in enumerate(group_of):
        first, width = rows * sum(widths[:group]), widths[group]
        found = [cells[first + r * width + below(start, i * rows + r, width)] for r in range(rows)]
        numbers.append(group * size + max(found))
    return numbers


def threelc(part, nnz, dtype, s):
    (scale,) = part.floats("f", 1)
    must(0 <= scale < math.inf, "a scale that cannot be")
    groups = []
    for byte in part.take(part.left()):
        groups += [121] * (byte - 241) if byte >= 243 else [byte]
    must(len(groups) == -(-nnz // 5), "another number of digits")
    digits = [group // 3**place % 3 - 1 for group in groups for place in (4, 3, 2, 1, 0)]
    must(not any(digits[nnz:]), "padding digits that are not zero")
    return [rounded((-scale, 0.0, scale)[digit + 1], dtype) for digit in digits[:nnz]]


# Curves


def fitpoly(part, nnz, dtype, segments, degree, block):
    return curves(part, nnz, dtype, degree, block, kind_bits=2, kinds=3)


def fitdexp(part, nnz, dtype, block):
    return curves(part, nnz, dtype, 5, block, kind_bits=3, kinds=5)


def curves(part, nnz, dtype, degree, block, kind_bits, kinds):
    count = part.varint()
    must(count <= nnz, "more runs than values")
    numbers = packed(part, max(min(block, nnz) - 1, 0).bit_length() + kind_bits, count)
    runs = [((number >> kind_bits) + 1, number % 2**kind_bits) for number in numbers]
    must(sum(length for length, _ in runs) == nnz, "runs of another number of values")
    values, parts = [], []
    for length, kind in runs:
        must(kind < kinds, "an unknown kind of run")
        must(len(values) // block == (len(values) + length - 1) // block, "a run beyond its block")
        key = (len(values) // block, kind)
        run = curve(part, length, kind, degree)
        if parts and parts[-1][0] == key:
            parts[-1][1].extend(run)
        else:
            parts.append((key, run))
        values += run
    flat = [value for _, run in parts for value in non_increasing(run)]
    return [rounded(clipped(value, dtype), dtype) for value in flat]


def curve(part, length, kind, degree):
    if kind == 0:
        return [0.0] * length
    coefficients = part.floats("f", 4 if kind >= 3 else min(length, degree + 1))
    must(all(math.isfinite(c) for c in coefficients), "a coefficient that is not finite")
    values = double_exponential(length, *coefficients) if kind >= 3 else polynomial(length, coefficients)
    if kind == 4:
        values = [-value for value in reversed(values)]
    if kind in (2, 4):
        return [0.0 if value > 0 else value for value in values]
    return [0.0 if value < 0 else value for value in values]


def polynomial(n, c):
    terms = len(c)
    q = [0.0]
    for k in range(1, terms):
        square = float(k * k)
        q.append(square * (float(n) * n - square) / ((4.0 * square - 1.0) * (n - 1.0) * (n - 1.0)))
    m, norm = [], 1.0
    for k in range(terms):
        if k:
            norm *= q[k]
        m.append(c[k] / math.sqrt(norm))
    values = []
    for i in range(n):
        x = (2.0 * i - (n - 1)) / max(n - 1, 1)
        y, after = m[-1], 0.0
        for k in range(terms - 2, -1, -1):
            y, after = (m[k] + x * y) - q[k + 1] * after, y
        values.append(y)
    return values


def double_exponential(n, level, weight, slow_rate, fast_rate):
    must(all(-1e9 <= rate <= 700 for rate in (slow_rate, fast_rate)), "a rate that cannot be")
    step = 1.0 / max(n - 1, 1)
    slow, fast = (exponential(-rate) if rate > 0 else 1.0 for rate in (slow_rate, fast_rate))
    slow_ratio, fast_ratio = exponential(slow_rate * step), exponential(fast_rate * step)
    values = []
    for _ in range(n):
        values.append(level * slow + weight * (fast - slow))
        slow *= slow_ratio
        fast *= fast_ratio
    return values


def exponential(x):
    power = math.floor(min(max(x, -1000.0), 700.0) / 0.6931471805599453 + 0.5)
    rest = max(x, -1000.0) - power * 0.6931471805599453
    total = 1.0
    for k in range(16, 0, -1):
        total = 1.0 + total * rest / k
    return math.ldexp(total, power)


def non_increasing(part):
    pools = []
    for y in part:
        pools.append((y, 1))
        while len(pools) > 1 and pools[-1][0] > pools[-2][0]:
            b, nb = pools.pop()
            a, na = pools.pop()
            pools.append((a + (b - a) * nb / (na + nb), na + nb))
    return [mean for mean, count in pools for _ in range(count)]


LARGEST = {"float16": 65504.0, "bfloat16": (2 - 2**-7) * 2.0**127, "float32": (2 - 2**-23) * 2.0**127, "float64": (2 - 2**-52) * 2.0**1023}


def clipped(value, dtype):
    return min(max(value, -LARGEST[dtype]), LARGEST[dtype])


# The wire ids: what decodes, and the kinds of the parameters


def integer(least, most):
    def parse(text):
        must(text.isdecimal() and least <= int(text) <= most, f"{text} is not between {least} and {most}")
        return int(text)

    return parse


def real(least, most):
    def parse(text):
        must(least <= float(text) <= most, f"{text} is not between {least} and {most}")
        return float(text)

    return parse


def word(*choices):
    meanings = {"true": True, "false": False, "auto": None}

    def parse(text):
        must(text in choices, f"{text} is not one of {choices}")
        return meanings.get(text, text)

    return parse


def auto_or(kind, *words):
    return lambda text: word("auto", *words)(text) if text in ("auto", *words) else kind(text)


JUST_ABOVE_0, JUST_BELOW_2 = math.nextafter(0, 1), math.nextafter(2, 1)

SPARSIFIERS = range(1, 7)
INDICES = {
    1: (raw_index,),
    2: (bitmap,),
    3: (all_positions,),
    4: (seeded,),
    5: (gap_codec(rle_gaps),),
    6: (huffman,),
    7: (gap_codec(delta_gaps),),
    8: (gap_codec(deltahuffman_gaps),),
    9: (gap_codec(rice_gaps),),
    10: (pco_index,),
    11: (bloom, word(*POLICIES), auto_or(real(1e-15, 0.99))),
    13: (shaped,),
}
VALUES = {
    1: (raw_value,),
    2: (fp16,),
    3: (bf16,),
    4: (deflate, integer(1, 9), word("true", "false", "auto")),
    5: (pco_value, integer(0, 12)),
    6: (qsgd, integer(2, 8), integer(1, 2**30), word("max", "l2")),
    7: (fitpoly, auto_or(integer(1, 255), "paper"), integer(0, 15), integer(2, 2**31)),
    8: (fitdexp, integer(2, 2**31)),
    9: (sketch, integer(1, 8), word("true", "false"), integer(0, 128), integer(1, 8), real(JUST_ABOVE_0, 1)),
    10: (threelc, real(1, JUST_BELOW_2)),
    11: (lloyd, integer(1, 8)),
}
