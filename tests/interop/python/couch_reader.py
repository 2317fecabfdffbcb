"""A strict reader of couchstore files that shares nothing with the server: written from the description of the format alone.

Readers of the format forgive much; this one does not. Whatever a rule says is checked, at every header of a file, and whatever the
two trees, the reductions and the local documents say of one another must agree. `python couch_reader.py FILE...` checks files.
"""

import json
import sys
import zlib
from collections import namedtuple

BLOCK = 4096
NOT_DELETED = (1 << 47) - 1
FIXED = {11: 25, 12: 25, 13: 33, 14: 39}

Header = namedtuple("Header", "at end version update_seq purge_seq timestamp previous by_seq by_id local")
Root = namedtuple("Root", "at size reduced")
Doc = namedtuple("Doc", "id seq rev deleted body_at body_size content_meta rev_meta")


class Wrong(Exception):
    """The file breaks a rule."""


def need(holds, what):
    if not holds:
        raise Wrong(what)


def _crc32c_table():
    table = []
    for n in range(256):
        for _ in range(8):
            n = (n >> 1) ^ 0x82F63B78 if n & 1 else n >> 1
        table.append(n)
    return table


CRC32C = _crc32c_table()


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC32C[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def number(data):
    return int.from_bytes(data, "big")


def unsnappy(data):
    """Raw snappy, as strictly as it can be read."""
    size, at = leb128(data, 0)
    out = bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        if tag & 3 == 0:
            length = (tag >> 2) + 1
            if length > 60:
                width = length - 60
                length = int.from_bytes(data[at : at + width], "little") + 1
                at += width
            need(at + length <= len(data), "snappy: a literal goes past the end")
            out += data[at : at + length]
            at += length
            continue
        if tag & 3 == 1:
            length, offset = ((tag >> 2) & 7) + 4, (tag >> 5) << 8 | data[at]
            at += 1
        else:
            width = 2 if tag & 3 == 2 else 4
            length, offset = (tag >> 2) + 1, int.from_bytes(data[at : at + width], "little")
            at += width
        need(0 < offset <= len(out), "snappy: a copy from before the beginning")
        for _ in range(length):
            out.append(out[-offset])
    need(len(out) == size, f"snappy: {len(out)} bytes instead of {size}")
    return bytes(out)


def leb128(data, at):
    value = shift = 0
    while True:
        need(at < len(data), "a number goes past the end")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


class File:
    def __init__(self, data):
        self.data = data

    def read(self, at, length):
        """`length` bytes of a string that goes around block markers, and where it ends."""
        out = bytearray()
        while len(out) < length:
            if at % BLOCK == 0:
                need(at < len(self.data) and self.data[at] in (0, 2), f"{at}: no data block")
                at += 1
            run = min(length - len(out), BLOCK - at % BLOCK)
            need(at + run <= len(self.data), f"{at}: past the end of the file")
            out += self.data[at : at + run]
            at += run
        return bytes(out), at

    def chunk(self, header, at, spans):
        """The payload of a data chunk; its place goes to `spans`."""
        frame, after = self.read(at, 8)
        need(frame[0] & 0x80, f"{at}: the frame of a data chunk lacks its high bit")
        length = number(frame[:4]) & 0x7FFFFFFF
        payload, end = self.read(after, length)
        need(end <= header.at, f"{at}: a chunk goes beyond the header that it belongs to")
        need(number(frame[4:]) == checksum(header.version)(payload), f"{at}: checksum of a chunk")
        # A chunk may be said to begin at the marker or behind it.
        spans[at + (at % BLOCK == 0)] = end
        return payload

    def headers(self):
        """Of all of them, oldest first. A block is data or a header, and every header is whole."""
        found = []
        for at in range(0, len(self.data), BLOCK):
            need(self.data[at] in (0, 1), f"{at}: a block that begins with {self.data[at]}")
            if self.data[at] == 1:
                found.append(self.header(at))
        need(found, "no header")
        need((len(self.data) - 2) // BLOCK * BLOCK <= found[-1].end, "something lies behind the newest header")
        return found

    def header(self, at):
        length, crc = number(self.data[at + 1 : at + 5]), number(self.data[at + 5 : at + 9])
        need(4 <= length <= 1024, f"{at}: a header of {length} bytes")
        body = self.data[at + 9 : at + 5 + length]
        need(len(body) == length - 4, f"{at}: a header goes past the end of the file")
        version = body[0]
        need(version in FIXED, f"{at}: version {version}")
        need(crc == checksum(version)(body), f"{at}: checksum of a header")
        need(number(body[13:19]) == 0, f"{at}: purge_ptr is not 0")
        sizes = [number(body[i : i + 2]) for i in (19, 21, 23)]
        need(len(body) == FIXED[version] + sum(sizes), f"{at}: a header of {len(body)} bytes with roots of {sizes}")
        roots, place = [], FIXED[version]
        for size, reduced in zip(sizes, (5, 16, 0)):
            need(size in (0, 12 + reduced), f"{at}: a root of {size} bytes")
            root = body[place : place + size]
            place += size
            roots.append(Root(number(root[:6]), number(root[6:12]), root[12:]) if size else None)
            need(not size or 0 < roots[-1].at < at, f"{at}: a root that is not below its header")
        timestamp = number(body[25:33]) if version >= 13 else 0
        previous = number(body[33:39]) >> 1 if version >= 14 else None
        need(version < 14 or body[38] & 1 == 0, f"{at}: says that the file is encrypted")
        update_seq, purge_seq = number(body[1:7]), number(body[7:13])
        return Header(at, at + 5 + length, version, update_seq, purge_seq, timestamp, previous, *roots)


def checksum(version):
    return zlib.crc32 if version == 11 else crc32c


class Tree:
    """One tree of one header, walked from its root. `entries` in order."""

    def __init__(self, file, header, root, reduce, spans, order=lambda key: key):
        self.file, self.header, self.reduce, self.spans, self.order = file, header, reduce, spans, order
        self.entries, self.depths, self.nodes = [], set(), 0
        if root is not None:
            size, reduced, _ = self.walk(root.at, 0)
            need((size, reduced) == (root.size, root.reduced), f"{header.at}: what a root says of its tree")
            need(len(self.depths) == 1, f"{header.at}: leaves at depths {self.depths}")
            keys = [order(key) for key, _ in self.entries]
            need(all(a < b for a, b in zip(keys, keys[1:])), f"{header.at}: keys do not ascend")

    def walk(self, at, depth):
        """Size of the subtree, its reduction, its last key."""
        self.nodes += 1
        stored = self.file.chunk(self.header, at, self.spans)
        node = unsnappy(stored)
        need(len(node) > 1 and node[0] in (0, 1), f"{at}: not a node, or an empty one")
        items, place = [], 1
        while place < len(node):
            need(place + 5 <= len(node), f"{at}: an entry is cut off")
            lengths = number(node[place : place + 5])
            key_len, value_len = lengths >> 28, lengths & 0xFFFFFFF
            place += 5
            need(place + key_len + value_len <= len(node), f"{at}: an entry goes past the end of its node")
            items.append((node[place : place + key_len], node[place + key_len : place + key_len + value_len]))
            place += key_len + value_len
        size = 8 + len(stored)
        if node[0] == 1:
            self.depths.add(depth)
            self.entries += items
            return size, self.reduce(items), items[-1][0]
        parts = []
        for key, value in items:
            child, child_size, length = number(value[:6]), number(value[6:12]), number(value[12:14])
            need(len(value) == 14 + length, f"{at}: a pointer of {len(value)} bytes")
            found_size, reduced, last = self.walk(child, depth + 1)
            need((found_size, reduced) == (child_size, value[14:]), f"{at}: what a pointer says of node {child}")
            need(last == key, f"{at}: a pointer's key is not the last of node {child}")
            size += child_size
            parts.append(reduced)
        return size, self.sum(parts), items[-1][0]

    def sum(self, parts):
        widths = {5: [5], 16: [5, 5, 6], 0: []}[len(parts[0])]
        out, place = b"", 0
        for width in widths:
            out += sum(number(part[place : place + width]) for part in parts).to_bytes(width, "big")
            place += width
        return out


def by_seq_doc(key, value):
    need(len(key) == 6 and len(value) >= 18, f"a by-seq entry of {len(key)} and {len(value)} bytes")
    lengths = number(value[:5])
    id_len, body_size = lengths >> 28, lengths & 0xFFFFFFF
    at = number(value[5:11])
    need(len(value) >= 18 + id_len, "an id goes past the end of a by-seq entry")
    rest = value[18:]
    return Doc(rest[:id_len], number(key), number(value[11:17]), at >> 47 == 1, at & NOT_DELETED, body_size, value[17], rest[id_len:])


def by_id_doc(key, value):
    need(len(value) >= 23, f"a by-id entry of {len(value)} bytes")
    at = number(value[10:16])
    return Doc(key, number(value[:6]), number(value[16:22]), at >> 47 == 1, at & NOT_DELETED, number(value[6:10]), value[22], value[23:])


def reduce_by_id(items):
    docs = [by_id_doc(*item) for item in items]
    deleted = sum(doc.deleted for doc in docs)
    sizes = sum(doc.body_size for doc in docs)
    return (len(docs) - deleted).to_bytes(5, "big") + deleted.to_bytes(5, "big") + sizes.to_bytes(6, "big")


class Commit:
    """What one header of a file reaches: `docs` by seqno, `locals` by id, `bodies` as clients stored them."""

    def __init__(self, file, header):
        self.header, spans = header, {}
        by_seq = Tree(file, header, header.by_seq, lambda items: len(items).to_bytes(5, "big"), spans)
        by_id = Tree(file, header, header.by_id, reduce_by_id, spans)
        self.locals = dict(Tree(file, header, header.local, lambda _: b"", spans).entries)
        self.nodes = by_seq.nodes + by_id.nodes
        self.docs = [by_seq_doc(*entry) for entry in by_seq.entries]
        same = sorted((by_id_doc(*entry) for entry in by_id.entries), key=lambda doc: doc.seq)
        need(self.docs == same, f"{header.at}: the two trees differ")
        need(all(doc.seq <= header.update_seq for doc in self.docs), f"{header.at}: a seqno beyond the newest")
        self.bodies = {doc.seq: self.body(file, doc, spans) for doc in self.docs}
        places = sorted(spans.items())
        need(all(a[1] <= b[0] for a, b in zip(places, places[1:])), f"{header.at}: chunks lie over one another")

    def value(self, doc):
        """As it was before anybody compressed it: the client, or the server."""
        body = self.bodies[doc.seq]
        return unsnappy(body) if body and doc.rev_meta[17] & 2 else body

    def body(self, file, doc, spans):
        need(doc.content_meta & 0x7C == 0, f"seqno {doc.seq}: content_meta {doc.content_meta:#x}")
        if doc.body_at == 0:
            need(doc.body_size == 0, f"seqno {doc.seq}: no body, of {doc.body_size} bytes")
            return None
        stored = file.chunk(self.header, doc.body_at, spans)
        need(doc.body_size == 8 + len(stored), f"seqno {doc.seq}: a body of {8 + len(stored)} bytes is said to have {doc.body_size}")
        return unsnappy(stored) if doc.content_meta & 0x80 else stored


def check_kv(commit):
    """What a key-value engine keeps besides the format's own rules."""
    header, docs = commit.header, commit.docs
    if header.update_seq == 0 and not commit.locals:
        return
    state = json.loads(commit.locals[b"_local/vbstate"])
    need(state["namespaces_supported"] is True, "vbstate: namespaces")
    need(state["state"] in ("active", "replica", "pending", "dead"), "vbstate: state")
    says = {name: int(state[name]) for name in ("snap_start", "snap_end", "completed_seqno", "prepared_seqno", "on_disk_prepares")}
    need(says["snap_start"] <= header.update_seq <= says["snap_end"], "vbstate: the snapshot does not span the high seqno")
    need(max(says["completed_seqno"], says["prepared_seqno"]) <= header.update_seq, "vbstate: prepares beyond the high seqno")
    need(sum(not doc.deleted and doc.id[0] == 2 for doc in docs) == says["on_disk_prepares"], "vbstate: on_disk_prepares")
    need(header.purge_seq <= header.update_seq, "purged beyond the high seqno")
    counts, highs = {}, {}
    for doc in docs:
        is_prepare = doc.id[0] == 2
        need(len(doc.id) <= 252 and len(doc.rev_meta) == (25 if is_prepare else 18), f"seqno {doc.seq}: id or rev_meta")
        need(doc.rev_meta[16] & 0x7F in (0, 1) and doc.rev_meta[17] & ~7 == 0, f"seqno {doc.seq}: rev_meta")
        need(doc.rev > 0 and (not doc.deleted or number(doc.rev_meta[8:12]) > 0), f"seqno {doc.seq}: revision or time of deletion")
        body, is_packed = commit.bodies[doc.seq], doc.rev_meta[17] & 2
        need(bool(doc.content_meta & 0x80) == bool(body and not is_packed), f"seqno {doc.seq}: compressed or not")
        commit.value(doc)
        collection, _ = leb128(doc.id, 1 if is_prepare else 0)
        if collection != 1:
            counts[collection] = counts.get(collection, 0) + (not doc.deleted and not is_prepare)
            highs[collection] = max(highs.get(collection, 0), doc.seq)
    for collection, count in counts.items():
        stored = commit.locals[f"|{collection:#x}|".encode()]
        said, at = leb128(stored, 0)
        high, at = leb128(stored, at)
        leb128(stored, at)
        need((said, high >= highs[collection]) == (count, True), f"collection {collection}: {said} items, {count} counted")


def check(path, kv=False):
    """All commits of a file, oldest first, each of them whole."""
    with open(path, "rb") as opened:
        file = File(opened.read())
    headers = file.headers()
    need(len({header.version for header in headers}) == 1, "headers of several versions")
    commits = [Commit(file, header) for header in headers]
    for earlier, later in zip(headers, headers[1:]):
        need(earlier.end <= later.at, f"{later.at}: headers overlap")
        if later.version >= 14:
            need(later.previous == earlier.at, f"{later.at}: the header before it is at {later.previous}")
    if kv:
        for commit in commits:
            check_kv(commit)
    return commits


if __name__ == "__main__":
    for path in sys.argv[1:]:
        commits = check(path, kv=True)
        newest = commits[-1]
        alive = sum(not doc.deleted for doc in newest.docs)
        print(f"{path}: v{newest.header.version}, {len(commits)} commits, {alive} alive, {len(newest.docs) - alive} deleted, purged to {newest.header.purge_seq}")
