"""Where the pair's training text comes from: one line per package, with its licence and how much of it is taken.

Only package names and versions are listed; `corpus.py` fetches them with the machine's own apt and pip. Never lists a
package whose text is not under a permissive licence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SKIPPED_PATHS = (
    r"/(tests?|testing|_?vendor(ed)?|externals?|locale|licenses?|dist-info|genindex|searchindex)"
    r"|/(LICEN[CS]E|COPYING|RECORD)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One package of `manager` "apt" or "pip"; files that match `paths` are read until `limit_mb` is reached."""

    manager: str
    package: str
    version: str
    licence: str
    paths: str
    limit_mb: float
    skipped: str = SKIPPED_PATHS

    def __post_init__(self) -> None:
        if self.manager not in ("apt", "pip"):
            raise ValueError(f"{self.package}: manager {self.manager!r} is neither 'apt' nor 'pip'")
        re.compile(self.paths)


def apt(package: str, version: str, licence: str, paths: str, limit_mb: float) -> Source:
    """A Debian 12 package."""
    return Source(manager="apt", package=package, version=version, licence=licence, paths=paths, limit_mb=limit_mb)


def pip(package: str, version: str, licence: str, limit_mb: float, paths: str = r"\.py$") -> Source:
    """A wheel; its Python source unless `paths` says otherwise."""
    return Source(manager="pip", package=package, version=version, licence=licence, paths=paths, limit_mb=limit_mb)


RST, HTML = r"\.rst\.txt(\.gz)?$", r"\.html(\.gz)?$"

SOURCES = (
    apt("python3.11-doc", "3.11.2-6+deb12u8", "PSF-2.0", RST, 12),
    apt("libpython3.11-stdlib", "3.11.2-6+deb12u8", "PSF-2.0", r"\.py$", 5),
    apt("postgresql-doc-15", "15.18-0+deb12u1", "PostgreSQL", HTML, 9),
    apt("llvm-16-doc", "1:16.0.6-15~deb12u1", "Apache-2.0 WITH LLVM-exception", RST, 9),
    apt("clang-16-doc", "1:16.0.6-15~deb12u1", "Apache-2.0 WITH LLVM-exception", RST, 3),
    apt(
        "rust-doc", "1.63.0+dfsg1-2", "MIT OR Apache-2.0", r"/html/(?!src|implementors|core/arch|std/arch).*\.html$", 9
    ),
    apt("cmake-doc", "3.25.1-1", "BSD-3-Clause", RST, 3),
    apt("sqlite3-doc", "3.40.1-2+deb12u2", "public domain", HTML, 7),
    apt("nodejs-doc", "18.20.4+dfsg-1~deb12u2", "MIT", r"\.md\.gz$", 4),
    apt("apache2-doc", "2.4.68-1~deb12u1", "Apache-2.0", r"/manual/en/.*\.html$", 4),
    apt("erlang-doc", "1:25.2.3+dfsg-1+deb12u4", "Apache-2.0", HTML, 5),
    apt("swift-doc", "2.30.1-0+deb12u1", "Apache-2.0", RST, 2),
    apt("twisted-doc", "22.4.0-4+deb12u1", "MIT", RST, 2),
    apt("sphinx-doc", "5.3.0-4", "BSD-2-Clause", RST, 1),
    apt("python-pandas-doc", "1.5.3+dfsg-2", "BSD-3-Clause", RST, 4),
    apt("python-django-doc", "3:3.2.25-0+deb12u3", "BSD-3-Clause", HTML, 6),
    apt("python-sqlalchemy-doc", "1.4.46+ds1-1", "MIT", HTML, 5),
    apt("python-scipy-doc", "1.10.1-2", "BSD-3-Clause", HTML, 4),
    apt("python-xarray-doc", "2023.01.0-1.1", "Apache-2.0", RST, 1),
    apt("python-tornado-doc", "6.2.0-3+deb12u4", "Apache-2.0", RST, 1),
    apt("python-aiohttp-doc", "3.8.4-1+deb12u1", "Apache-2.0", RST, 1),
    pip("agentdojo", "0.1.35", "MIT", 1),
    pip("apache-airflow-core", "3.3.2", "Apache-2.0", 4),
    pip("botocore", "1.44.8", "Apache-2.0", 1.5),
    pip("django", "5.2.19", "BSD-3-Clause", 4),
    pip("google-adk", "2.13.0", "Apache-2.0", 4),
    pip("kubernetes", "37.0.2", "Apache-2.0", 2),
    pip("langchain-core", "1.8.4", "MIT", 2.5),
    pip("mcp", "2.3.0", "MIT", 1.5),
    pip("networkx", "3.6.1", "BSD-3-Clause", 3),
    pip("numpy", "2.4.6", "BSD-3-Clause", 3),
    pip("openai", "3.57.0", "Apache-2.0", 3),
    pip("pandas", "3.1.1", "BSD-3-Clause", 4),
    pip("scikit-learn", "1.9.1", "BSD-3-Clause", 4),
    pip("sympy", "1.14.0", "BSD-3-Clause", 3),
    pip("transformers", "5.19.0", "Apache-2.0", 4),
)

BFCL = pip("bfcl-eval", "2026.3.23", "Apache-2.0", 40, r"/data/.*\.json$")
