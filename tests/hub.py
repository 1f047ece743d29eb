"""A hub on localhost, as huggingface_hub and datasets ask for one, with faults on demand.

Repositories are directories: ROOT/models/ORGANISATION/NAME and ROOT/datasets/…; a branch other than
main is a directory NAME@BRANCH.
"""

import hashlib
import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    """Serves the repositories under a directory. faults: what it does wrong, by repository's name.

    A fault is a status (403, 429, 503), "gated", "silent" (accepts, never answers) or a number of
    bytes a second as a float. requests: (method, path) of all that was asked.
    """

    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.faults, self.requests = root, {}, []
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def find(self, kind: str, name: str, revision: str) -> Path | None:
        """The directory of a repository at a branch or a commit; None if there is none."""
        for directory in sorted((self.root / kind).glob(f"{name}*")):
            base, _, branch = directory.name.partition("@")
            wanted = (branch or "main", commit_of(directory))
            if base == name.split("/")[1] and revision in wanted:
                return directory
        return None


class Handler(BaseHTTPRequestHandler):
    """Answers one request to a Hub, its `server`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append((self.command, path))
        parts = [unquote(part) for part in path.strip("/").split("/")]
        is_api = parts[0] == "api"
        parts = parts[1:] if is_api else parts
        kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
        name, rest = "/".join(parts[:2]), parts[2:]
        fault = self.server.faults.get(name) or self.server.faults.get("*")
        if fault == "silent":
            time.sleep(3600)
        if fault == "gated":
            return self.refuse("GatedRepo", 403)
        if isinstance(fault, int):
            return self.send(fault, {}, b"{}")
        repository = self.server.find(kind, name, rest[1] if len(rest) > 1 else "main")
        if repository is None:
            exists = self.server.find(kind, name, "main")
            return self.refuse("RevisionNotFound" if exists else "RepoNotFound")
        if is_api:
            return self.send(200, {}, json.dumps(describe(repository, name, rest)).encode())
        file = repository / "/".join(rest[2:])
        if rest[0] != "resolve" or not file.is_file():
            return self.refuse("EntryNotFound")
        body = file.read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()}"'
        self.send(200, {"X-Repo-Commit": commit_of(repository), "ETag": etag}, body, fault)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def log_message(self, *arguments) -> None:
        pass

    def refuse(self, code: str, status: int = 404) -> None:
        self.send(status, {"X-Error-Code": code}, b"{}")

    def send(self, status: int, headers: dict, body: bytes, rate: float | None = None) -> None:
        """Answer. rate: bytes a second; None: all at once."""
        self.send_response(status)
        for header, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(header, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        step = max(1, len(body) if rate is None else int(rate / 10))
        with suppress(BrokenPipeError, ConnectionResetError):  # whoever asked is gone
            for at in range(0, len(body), step):
                self.wfile.write(body[at : at + step])
                time.sleep(0.1 if rate else 0.0)


def commit_of(repository: Path) -> str:
    return hashlib.sha1(str(repository).encode()).hexdigest()


def describe(repository: Path, name: str, rest: list[str]) -> object:
    """What the API says of a repository: of itself, or of the files in it."""
    files = []
    for file in sorted(path for path in repository.rglob("*") if path.is_file()):
        path, body = str(file.relative_to(repository)), file.read_bytes()
        digest = hashlib.sha256(body).hexdigest()[:40]
        names = {"type": "file", "path": path, "rfilename": path, "oid": digest, "blobId": digest}
        files.append(names | {"size": len(body)})
    if rest[:1] == ["tree"]:
        directories = {str(Path(file["path"]).parent) for file in files} - {"."}
        folder = {"type": "directory", "size": 0, "oid": "0" * 40}
        files += [folder | {"path": path} for path in directories]
        return [entry for entry in files if entry["path"].startswith("/".join(rest[2:]))]
    if rest[:1] == ["paths-info"]:
        return []
    private = {"private": False, "gated": False, "disabled": False, "downloads": 0, "likes": 0}
    return private | {"id": name, "sha": commit_of(repository), "siblings": files, "tags": []}
