"""Environment whose tool searches a local corpus with BM25.

    <tool_call>{"name": "search", "arguments": {"query": "capital of Peru"}}</tool_call>

The score of a document d for a query is, over the terms t of the query,

    sum_t  idf(t) * f(t, d) / (f(t, d) + k1 * (1 - b + b * |d| / mean |d|))
    idf(t) = log(1 + (N - n(t) + 0.5) / (n(t) + 0.5))

with the frequency f of a term in a document, N documents, n(t) documents that contain the term,
k1 = 1.2 and b = 0.75 (Robertson et al., TREC-3, 1994; this form, whose idf is never negative, is in
apache/lucene, lucene/core/src/java/org/apache/lucene/search/similarities/BM25Similarity.java, lines
84 and 101, and `explainTF`).
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flow_grpo.config.paths import resolve_path
from flow_grpo.errors import UserError
from flow_grpo.untrusted_files import parse_json, read_text, split_lines
from flow_grpo.vlm.environments.tool_calls import (
    ToolEnvironment,
    check_option,
    shorten,
    text_argument,
)

K1, B = 1.2, 0.75
MAX_QUERY_CHARACTERS = 1000
MAX_DOCUMENTS = 10**6
MIN_DOCUMENT_CHARACTERS = 50  # of an observation
TEXT_SUFFIXES, JSON_SUFFIX = (".txt", ".md"), ".jsonl"
WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Document:
    title: str
    text: str


class LocalSearch(ToolEnvironment):
    """Environment with the tool `search`.

    Args:
        corpus: A JSONL file with the column `text` and optionally `title`, or a directory of such
            files and text files (.txt, .md), whose paragraphs are the documents.
        results: Maximum number of documents per search.
        max_characters: Maximum length of an observation, divided equally among its documents.
        error_reward: Reward of a turn whose call fails.
    """

    name = "search"

    def __init__(
        self,
        corpus: str,
        results: int = 3,
        max_characters: int = 1000,
        error_reward: float = 0.0,
    ) -> None:
        super().__init__(error_reward)
        self.results = check_option("results", results, 1, 100, whole=True)
        self.max_characters = check_option("max_characters", max_characters, 50, 10**5, whole=True)
        if self.max_characters < MIN_DOCUMENT_CHARACTERS * self.results:
            raise UserError(
                f"must be at least {MIN_DOCUMENT_CHARACTERS} per result, i.e. "
                f"{MIN_DOCUMENT_CHARACTERS * self.results}",
                field="environment_options.max_characters",
                value=max_characters,
            )
        self.index = load_index(str(corpus))

    def call(self, arguments: dict[str, Any]) -> str:
        """Return the best documents for the query, or a message that there are none."""
        query = text_argument(arguments, "query", MAX_QUERY_CHARACTERS)
        found = self.index.search(query, self.results)
        if not found:
            return "No results."
        entries = [
            f"[{number}] " + "\n".join(part for part in (each.title, each.text) if part)
            for number, each in enumerate(found, 1)
        ]
        return "\n".join(shorten(entry, self.max_characters // len(entries)) for entry in entries)


class Bm25Index:
    """Inverted index with the weight of each term in each document.

    Args:
        documents: The corpus, which must not be empty.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents
        counts = [Counter(split_terms(f"{each.title} {each.text}")) for each in documents]
        lengths = np.array([each.total() for each in counts], np.float64)  # (N,)
        norms = K1 * (1 - B + B * lengths / max(lengths.mean(), 1.0))  # (N,)
        postings: dict[str, list[tuple[int, int]]] = {}
        for number, terms in enumerate(counts):
            for term, count in terms.items():
                postings.setdefault(term, []).append((number, count))
        # by term: indices of its documents (n,) and its contribution to their scores (n,)
        self.postings: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for term, entries in postings.items():
            index, frequency = np.array(entries).T
            idf = math.log(1 + (len(documents) - len(index) + 0.5) / (len(index) + 0.5))
            self.postings[term] = index, idf * frequency / (frequency + norms[index])

    def scores(self, query: str) -> np.ndarray:
        """Return the score of each document, (N,)."""
        scores = np.zeros(len(self.documents))
        for term, count in Counter(split_terms(query)).items():
            if term in self.postings:
                index, weights = self.postings[term]
                scores[index] += count * weights
        return scores

    def search(self, query: str, most: int) -> list[Document]:
        """Return up to `most` documents that contain a query term; ties keep the corpus order."""
        scores = self.scores(query)
        order = np.argsort(-scores, kind="stable")[:most]
        return [self.documents[i] for i in order if scores[i] > 0]


def split_terms(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return WORD.findall(text.lower())


@functools.cache
def load_index(corpus: str) -> Bm25Index:
    """Read and index a corpus, once per worker process.

    Raises:
        UserError: If it is missing, empty, too large or malformed.
    """
    path, field = Path(resolve_path(corpus)), "environment_options.corpus"
    if not path.exists():
        raise UserError("does not exist", field=field, value=corpus)
    documents = []
    for document in _read_documents(path):
        documents.append(document)
        if len(documents) > MAX_DOCUMENTS:
            raise UserError(f"has more than {MAX_DOCUMENTS:,} documents", field=field, value=corpus)
    if not documents:
        raise UserError(
            f"has no documents ({', '.join((*TEXT_SUFFIXES, JSON_SUFFIX))})",
            field=field,
            value=corpus,
        )
    return Bm25Index(documents)


def _read_documents(path: Path) -> Iterator[Document]:
    """Yield the documents of a file, or of all files of a directory in alphabetical order."""
    if path.is_dir():
        for each in sorted(path.rglob("*")):
            if each.is_file() and each.suffix in (*TEXT_SUFFIXES, JSON_SUFFIX):
                yield from _read_documents(each)
    elif path.suffix == JSON_SUFFIX:
        for number, line in enumerate(split_lines(read_text(path)), 1):
            if line.strip():
                yield _parse_line(line, f"{path}:{number}")
    else:
        for paragraph in re.split(r"\n\s*\n", read_text(path).replace("\r\n", "\n")):
            if paragraph.strip():
                yield Document(path.stem, paragraph.strip())


def _parse_line(line: str, where: str) -> Document:
    row = parse_json(line, where)
    texts = [row.get("title") or "", row.get("text")] if isinstance(row, dict) else [None]
    if not all(isinstance(each, str) for each in texts):
        rule = "must be a JSON object with the strings `text` and, optionally, `title`"
        raise UserError(rule, field=where)
    return Document(*texts)
