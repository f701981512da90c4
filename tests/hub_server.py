"""A small local Hub: the endpoints that huggingface_hub's client uses to push a model and to load it by name."""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """A model repository: its visibility and, for each branch, its files."""

    visibility: str | None
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})

    def commit(self, branch: str) -> str:
        """A 40-digit name of the branch's content."""
        digest = hashlib.sha1()
        for path, content in sorted(self.branches[branch].items()):
            digest.update(path.encode() + hashlib.sha1(content).digest())
        return digest.hexdigest()

    def files(self, revision: str) -> dict[str, bytes] | None:
        """The files at a branch or commit."""
        for branch, files in self.branches.items():
            if revision in (branch, self.commit(branch)):
                return files
        return None


class HubServer:
    """
    Serves on a free local port inside a `with` block.

    Attributes:
        url: what to set HF_ENDPOINT to. The client reads that variable when it is first imported.
        repos: {"user/name": Repo}.
        requests: (method, path, Authorization header) of each request, in order.
    """

    TOKEN = "hf_local_test_token"

    def __enter__(self):
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def _respond(self, status=200, body=b"", headers=None):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers = {"Content-Type": "application/json"} | (headers or {})
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status, code):
        self._respond(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _handle(self):
        path = unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization")
        self.hub.requests.append((self.command, path, authorization))
        body, parts = self._body(), path.strip("/").split("/")
        # As at the real Hub's storage, an upload link carries its own permission.
        if self.command == "PUT" and parts[0] == "lfs":
            if hashlib.sha256(body).hexdigest() != parts[1]:
                return self._error(400, "BadDigest")
            self.hub.blobs[parts[1]] = body
            return self._respond()
        if self.command == "POST":
            if authorization != f"Bearer {self.hub.TOKEN}":
                return self._error(401, "Unauthorized")
            if path == "/api/validate-yaml":
                return self._respond(body={"errors": [], "warnings": []})
            if path == "/api/repos/create":
                return self._create_repo(json.loads(body))
            if path.endswith(".git/info/lfs/objects/batch"):
                return self._lfs_batch(json.loads(body))
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            repo_id, action = "/".join(parts[2:4]), parts[4:]
        elif parts[2:3] == ["resolve"]:
            repo_id, action = "/".join(parts[:2]), parts[2:]
        else:
            return self._error(404, "NotFound")
        if repo_id not in self.hub.repos:
            return self._error(404, "RepoNotFound")
        self._handle_repo(repo_id, self.hub.repos[repo_id], action or ["revision", "main"], body)

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _create_repo(self, request):
        repo_id = f"{request['organization'] or 'me'}/{request['name']}"
        status = 409 if repo_id in self.hub.repos else 200
        self.hub.repos.setdefault(repo_id, Repo(request.get("visibility")))
        self._respond(status, {"url": f"{self.hub.url}/{repo_id}"})

    def _lfs_batch(self, request):
        objects = [
            {**item, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}}
            for item in request["objects"]
        ]
        self._respond(body={"transfer": "basic", "objects": objects})

    def _handle_repo(self, repo_id, repo, action, body):
        revision = action[1]
        if action[0] == "branch":
            status = 409 if revision in repo.branches else 200
            repo.branches.setdefault(revision, dict(repo.branches["main"]))
            return self._respond(status, {})
        files = repo.files(revision)
        if files is None:
            return self._error(404, "RevisionNotFound")
        if action[0] == "preupload":
            modes = [
                {
                    "path": item["path"],
                    "uploadMode": "lfs" if item["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for item in json.loads(body)["files"]
            ]
            return self._respond(body={"files": modes})
        if action[0] == "commit":
            for line in body.splitlines():
                operation = json.loads(line)
                value = operation["value"]
                if operation["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "lfsFile":
                    files[value["path"]] = self.hub.blobs[value["oid"]]
            commit = repo.commit(revision)
            url = f"{self.hub.url}/{repo_id}/commit/{commit}"
            return self._respond(body={"commitUrl": url, "commitOid": commit})
        commit = repo.commit(revision) if revision in repo.branches else revision
        if action[0] == "revision":
            siblings = [{"rfilename": path} for path in files]
            private = repo.visibility == "private"
            return self._respond(body={"id": repo_id, "sha": commit, "private": private, "siblings": siblings})
        if action[0] == "tree":
            tree = [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in files.items()
            ]
            return self._respond(body=tree)
        path = "/".join(action[2:])
        if path not in files:
            return self._error(404, "EntryNotFound")
        etag = f'"{hashlib.sha256(files[path]).hexdigest()}"'
        self._respond(body=files[path], headers={"X-Repo-Commit": commit, "ETag": etag})
