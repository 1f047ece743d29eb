"""A hub on localhost, as huggingface_hub and datasets ask for one, with faults on demand.

Repositories are directories: ROOT/models/ORGANISATION/NAME and ROOT/datasets/…; a branch other than
main is a directory NAME@BRANCH. Files over 1 kB are served in parts on request (Range), as the real
one does.
"""

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Hub:
    """Serves the repositories under a directory. faults: what it does wrong, by repository's name.

    A fault is a status (403, 429, 503), "gated", "silent" (accepts, never answers) or a number of
    bytes a second as a float. requests: (method, path, Range) of all that was asked.
    """

    def __init__(self, root: Path):
        self.root, self.faults, self.requests = root, {}, []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                hub.answer(self, is_head=True)

            def do_GET(self):
                hub.answer(self, is_head=False)

            def do_POST(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                hub.answer(self, is_head=False)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, is_head: bool) -> None:
        url = urlsplit(request.path)
        self.requests.append((request.command, url.path, request.headers.get("Range")))
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        is_api = parts[0] == "api"
        parts = parts[1:] if is_api else parts
        kind = parts.pop(0) if parts and parts[0] in ("models", "datasets") else "models"
        name, rest = "/".join(parts[:2]), parts[2:]
        fault = self.faults.get(name) or self.faults.get("*")
        if fault == "silent":
            time.sleep(3600)
        if fault == "gated":
            return send(request, 403, b"{}", {"X-Error-Code": "GatedRepo"})
        if isinstance(fault, int):
            return send(request, fault, b"{}")
        revision = rest[1] if len(rest) > 1 else "main"
        repository = self.find(kind, name, revision)
        if repository is None:
            exists = self.find(kind, name, "main") is not None
            code = "RevisionNotFound" if exists else "RepoNotFound"
            return send(request, 404, b"{}", {"X-Error-Code": code})
        if is_api:
            return send_json(request, describe(repository, name, rest))
        path = repository / "/".join(rest[2:])
        if rest[0] != "resolve" or not path.is_file():
            return send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        rate = fault if isinstance(fault, float) else None
        return send_file(request, path, commit_of(repository), rate, is_head)

    def find(self, kind: str, name: str, revision: str) -> Path | None:
        """The directory of a repository at a branch or a commit; None if there is none."""
        for directory in sorted((self.root / kind).glob(f"{name}*")):
            base, _, branch = directory.name.partition("@")
            wanted = (branch or "main", commit_of(directory))
            if base == name.split("/")[1] and revision in wanted:
                return directory
        return None


def commit_of(repository: Path) -> str:
    return hashlib.sha1(str(repository).encode()).hexdigest()


def files_of(repository: Path) -> list[Path]:
    return sorted(path for path in repository.rglob("*") if path.is_file())


def etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def describe(repository: Path, name: str, rest: list[str]) -> object:
    """What the API says of a repository: of itself, or of the files in it."""
    files = [
        {
            "type": "file",
            "path": str(path.relative_to(repository)),
            "rfilename": str(path.relative_to(repository)),
            "size": path.stat().st_size,
            "oid": etag(path)[:40],
            "blobId": etag(path)[:40],
        }
        for path in files_of(repository)
    ]
    if rest and rest[0] == "tree":
        under = "/".join(rest[2:])
        directories = {str(Path(file["path"]).parent) for file in files} - {"."}
        folder = {"type": "directory", "size": 0, "oid": "0" * 40}
        entries = files + [folder | {"path": path} for path in directories]
        return [entry for entry in entries if entry["path"].startswith(under)]
    if rest and rest[0] == "paths-info":
        return []
    private = {"private": False, "gated": False, "disabled": False, "downloads": 0, "likes": 0}
    return private | {"id": name, "sha": commit_of(repository), "siblings": files, "tags": []}


def send(request, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    request.send_response(status)
    for header, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        request.send_header(header, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def send_json(request, value: object) -> None:
    send(request, 200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def send_file(request, path: Path, commit: str, rate: float | None, is_head: bool) -> None:
    """Send a file, or the part of it that was asked for; rate: bytes a second."""
    body, start = path.read_bytes(), 0
    wanted = request.headers.get("Range")
    if wanted:
        start = int(wanted.removeprefix("bytes=").split("-")[0])
    request.send_response(206 if wanted else 200)
    request.send_header("X-Repo-Commit", commit)
    request.send_header("ETag", f'"{etag(path)}"')
    request.send_header("Content-Length", str(len(body) - start))
    if wanted:
        request.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
    request.end_headers()
    if is_head:
        return
    step = len(body) if rate is None else max(1, int(rate / 10))
    try:
        for at in range(start, len(body), step):
            request.wfile.write(body[at : at + step])
            if rate is not None:
                time.sleep(0.1)
    except (BrokenPipeError, ConnectionResetError):
        pass  # whoever asked is gone
