"""A tenant's active rows and vectors in memory, small: rows compressed, vectors in half precision where that is exact.

A flat scan pays for reading scattered vectors and many columns, not for the
distances: held as one matrix, a tenant's vectors are compared in well under a
millisecond, and exactly.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from warmstart.store.reads import Candidate
from warmstart.store.schema import SHOWN, Row, at_us

#: What one costs about beside what Arrow and numpy count, and each of its rows.
OVERHEAD: Final = 16_384
_ROW_OVERHEAD: Final = 24
#: What a row is kept as, but its id and its vector.
_KEPT: Final = [c for c in SHOWN if c != "id"]
_TIMES: Final = [c for c in _KEPT if c.endswith("_at")]
#: Before what is compressed: its length, and that of the search_text it begins with.
_HEAD: Final = struct.Struct("<II")
_CODEC: Final = pa.Codec("lz4_raw")
#: So many vectors of 384 numbers are widened at once, and stay in the processor's cache.
_BLOCK: Final = 256
_HALVES_SCALE: Final = np.float32(2.0**112)
_SIGN_AND_VALUE: Final = np.int32(-0x70000001)

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A tenant's active rows at one moment, in the order of their ids; never changed once made."""

    #: Each row, packed.
    rows: pa.BinaryArray
    ids: npt.NDArray[np.bytes_]
    #: As in the table, of the rows that have one (a vector of zeros is none), as half or single precision.
    vectors: npt.NDArray[Any]
    #: Of each vector its length, and where its row stands.
    lengths: Matrix
    with_vector: npt.NDArray[np.int64]
    created_us: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rows: pa.Table) -> Snapshot:
        """`rows` have the columns SHOWN, `search_text` and `embedding`."""
        ids = _bytes(rows["id"])
        order = np.argsort(ids, kind="stable")
        rows, ids = rows.take(order), ids[order]
        column = rows["embedding"]
        having = np.flatnonzero(np.asarray(pc.is_valid(column)))
        flat = pc.drop_null(column).combine_chunks()
        vectors = flat.flatten().to_numpy().reshape(-1, column.type.list_size)
        lengths = np.linalg.norm(vectors, axis=1)
        some = lengths > 0
        vectors = vectors[some]
        with np.errstate(over="ignore"):
            halves = vectors.astype(np.float16)
        vectors = halves if np.array_equal(halves, vectors) else vectors
        created_us = rows["created_at"].cast(pa.int64()).to_numpy()
        return cls(_packed(rows), ids, vectors, lengths[some], having[some], created_us)

    @property
    def size(self) -> int:
        """About how many bytes of memory it takes."""
        arrays = self.ids.nbytes + self.vectors.nbytes
        return int(arrays + self.rows.nbytes + len(self.ids) * _ROW_OVERHEAD + OVERHEAD)

    def nearest(self, query: Sequence[float], depth: int) -> list[Candidate]:
        """The `depth` nearest by cosine: best first, then the newer, then the id."""
        wanted = np.asarray(query, dtype=np.float32)
        length = float(np.linalg.norm(wanted))
        if not len(self.with_vector) or not length > 0:
            return []
        scores = self._products(wanted / length) / self.lengths
        if len(scores) > depth:
            least = np.partition(scores, -depth)[-depth]
            chosen = np.flatnonzero(scores >= least)
        else:
            chosen = np.arange(len(scores))
        places = self.with_vector[chosen]
        found = [
            Candidate(i.decode(), s, c, v)
            for i, s, c, v in zip(
                self.ids[places].tolist(), scores[chosen].tolist(), self.created_us[places].tolist(),
                self._units(chosen), strict=True,
            )
        ]  # fmt: skip
        found.sort(key=lambda c: c.order)
        return found[:depth]

    def vectors_of(self, ids: Sequence[str]) -> dict[str, Matrix]:
        """The unit vectors of those of `ids` that have one."""
        if not len(self.with_vector):
            return {}
        places = self._places(ids)
        at = np.minimum(np.searchsorted(self.with_vector, places), len(self.with_vector) - 1)
        having = np.flatnonzero((places >= 0) & (self.with_vector[at] == places))
        return {ids[i]: vector for i, vector in zip(having.tolist(), self._units(at[having]), strict=True)}

    def text_candidates(self, matches: Sequence[tuple[str, float]], depth: int) -> list[Candidate] | None:
        """The `depth` best of `matches` (id, BM25; more than `depth` where there are more), best first.

        None where the held rows can't tell: a tie that goes on behind them, or a row newer than the snapshot.
        """
        if len(matches) > depth and matches[depth - 1][1] == matches[-1][1]:
            return None
        places = self._places([memory_id for memory_id, _ in matches])
        if (places < 0).any():
            return None
        texts = [raw[:end].decode() for raw, end in self._unpacked(places)]
        created = self.created_us[places].tolist()
        found = [Candidate(i, s, c, t) for (i, s), c, t in zip(matches, created, texts, strict=True)]
        found.sort(key=lambda c: c.order)
        return found[:depth]

    def get(self, ids: Sequence[str]) -> dict[str, Row]:
        """Those of `ids` that are here, with the columns SHOWN."""
        places = self._places(ids)
        there = places[places >= 0]
        found: dict[str, Row] = {}
        for memory_id, (raw, end) in zip(self.ids[there].tolist(), self._unpacked(there), strict=True):
            values = pickle.loads(raw[end:])  # noqa: S301 - it never left this process
            row = {"id": memory_id.decode()} | dict(zip(_KEPT, values, strict=True))
            for column in _TIMES:
                if (us := row[column]) is not None:
                    row[column] = at_us(us)
            found[row["id"]] = row
        return found

    def changed(self, ids: Iterable[str], fresh: pa.Table) -> Snapshot:
        """With the rows of `ids` as they are in `fresh`; those that aren't in it are gone."""
        keep = np.ones(len(self.ids), dtype=bool)
        places = self._places(list(ids))
        keep[places[places >= 0]] = False
        added = Snapshot.of(fresh)
        kept = keep[self.with_vector]
        all_ids = np.concatenate([self.ids[keep], added.ids])
        order = np.argsort(all_ids, kind="stable")
        place = np.empty_like(order)  # where a row of both stands now
        place[order] = np.arange(len(order))
        before = (np.cumsum(keep) - 1)[self.with_vector[kept]]
        with_vector = place[np.concatenate([before, added.with_vector + int(keep.sum())])]
        ordered = np.argsort(with_vector)
        return Snapshot(
            pa.concat_arrays([self.rows.filter(pa.array(keep)), added.rows]).take(pa.array(order)),
            all_ids[order],
            np.concatenate([self.vectors[kept], added.vectors])[ordered],
            np.concatenate([self.lengths[kept], added.lengths])[ordered],
            with_vector[ordered],
            np.concatenate([self.created_us[keep], added.created_us])[order],
        )

    def _products(self, query: Matrix) -> Matrix:
        # row by row, so that equal vectors have equal scores; as a product their place would matter
        products = np.empty(len(self.vectors), np.float32)
        if self.vectors.dtype == np.float32:
            return np.einsum("ij,j->i", self.vectors, query, out=products)
        scaled = query * _HALVES_SCALE
        for start in range(0, len(products), _BLOCK):
            here = slice(start, start + _BLOCK)
            np.einsum("ij,j->i", _widened(self.vectors[here]), scaled, out=products[here])
        return products

    def _units(self, rows: npt.NDArray[np.int64]) -> Matrix:
        units: Matrix = self.vectors[rows].astype(np.float32) / self.lengths[rows, np.newaxis]
        return units

    def _places(self, ids: Sequence[str]) -> npt.NDArray[np.int64]:
        """Where each row stands; -1 for one that isn't here."""
        if not len(self.ids) or not ids:
            return np.full(len(ids), -1)
        wanted = np.array([i.encode() for i in ids])
        at = np.minimum(np.searchsorted(self.ids, wanted), len(self.ids) - 1)
        return np.where(self.ids[at] == wanted, at, -1)

    def _unpacked(self, places: npt.NDArray[np.int64]) -> Iterator[tuple[bytes, int]]:
        """Of each row its search_text and its values, pickled, and where these begin."""
        for packed in self.rows.take(pa.array(places)).to_pylist():
            length, end = _HEAD.unpack_from(packed)
            yield _CODEC.decompress(packed[_HEAD.size :], length, asbytes=True), end


def _widened(halves: npt.NDArray[np.float16]) -> Matrix:
    """The numbers in single precision, each divided by _HALVES_SCALE, exactly.

    By moving bits, which takes a fourth of what `astype` does: the sign, which fills what is new on the left, stays
    once; the exponents' bias, which differs between the two, is the scale.
    """
    bits = halves.view(np.int16).astype(np.int32)
    bits <<= 13
    bits &= _SIGN_AND_VALUE
    return bits.view(np.float32)


def _packed(rows: pa.Table) -> pa.BinaryArray:
    # the texts say much of the same, so a row is compressed as one
    columns = [rows[c].cast(pa.int64()) if c in _TIMES else rows[c] for c in _KEPT]
    packed = []
    for search_text, *values in zip(*(c.to_pylist() for c in (rows["search_text"], *columns)), strict=True):
        text = search_text.encode()
        raw = text + pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
        packed.append(_HEAD.pack(len(raw), len(text)) + _CODEC.compress(raw, asbytes=True))
    return pa.array(packed, pa.binary())


def _bytes(ids: pa.ChunkedArray) -> npt.NDArray[np.bytes_]:
    return np.array([i.encode() for i in ids.to_pylist()], dtype=np.bytes_)
