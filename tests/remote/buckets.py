"""A store on loopback that speaks as S3 does: it lists, takes objects in parts, copies, and checks who signed."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import md5
from urllib.parse import parse_qsl, quote, unquote
from xml.sax.saxutils import escape, unescape

from tests.remote.servers import Handler, Server, serving

KEY, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI"


def mac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def is_signed(method: str, path: str, headers: dict[str, str]) -> bool:
    """Say whether a request has the signature of our keys, version 4: https://docs.aws.amazon.com/AmazonS3, "SigV4"."""
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    fields = dict(field.strip().split("=", 1) for field in rest.split(",") if "=" in field)
    if scheme != "AWS4-HMAC-SHA256" or not fields["Credential"].startswith(f"{KEY}/"):
        return False
    _, day, region, service, end = fields["Credential"].split("/")
    names = fields["SignedHeaders"].split(";")
    signed = "".join(f"{name}:{headers[name].strip()}\n" for name in names)
    place, _, asked = path.partition("?")
    place = quote(place, safe="/%-._~")
    pairs = sorted((quote(name, safe="-._~"), quote(value, safe="-._~")) for name, value in parse_qsl(asked, True))
    query = "&".join(f"{name}={value}" for name, value in pairs)
    request = "\n".join((method, place, query, signed, ";".join(names), headers["x-amz-content-sha256"]))
    scope = f"{day}/{region}/{service}/{end}"
    text = f"{scheme}\n{headers['x-amz-date']}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{SECRET}".encode()
    for part in (day, region, service, end):
        key = mac(key, part)
    return hmac.compare_digest(mac(key, text).hex(), fields["Signature"])


def checks_keys(server: Server) -> None:
    def refuse(handler: Handler) -> bool:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        if is_signed(handler.command, handler.path, headers):
            return False
        handler.answer(403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>")
        return True

    server.before = refuse


class Bucket(Handler):
    """The requests that write, those that list, and those that read."""

    parts: dict[str, tuple[str, dict[int, bytes]]]
    """Uploads that are under way: the path of each, and its parts."""
    log: list[tuple[str, str]]

    least_nbytes = 5 << 20
    """Of a part that is not the last."""

    def get(self) -> None:
        with self.server.lock:
            self.log.append((self.command, self.path))
        if "list-type" not in self.path:
            super().get()
        elif not self.server.before(self):
            self.list()

    def change(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            self.log.append((self.command, self.path))
        if not self.server.before(self):
            {"PUT": self.put, "POST": self.post, "DELETE": self.delete}[self.command]()

    def list(self) -> None:
        """Answer ListObjectsV2, three names at a time."""
        asked = dict(parse_qsl(self.path.partition("?")[2], True))
        head = f"{self.path.partition('?')[0].rstrip('/')}/"
        prefix, delimiter = head + asked.get("prefix", ""), asked.get("delimiter", "")
        found = sorted(name for name in self.server.files if name.startswith(prefix))
        folders = {name[: name.index(delimiter, len(prefix)) + 1] for name in found if delimiter in name[len(prefix) :]}
        folders = folders if delimiter else set()
        found = [name for name in found if not any(name.startswith(folder) for folder in folders)]
        start = int(asked.get("continuation-token", "0"))
        page = found[start : start + 3]
        more = start + 3 < len(found)
        contents = "".join(
            f"<Contents><Key>{escape(name[len(head) :])}</Key><LastModified>2026-11-22T00:00:00Z</LastModified>"
            f'<ETag>"{md5(self.server.files[name]).hexdigest()}"</ETag><Size>{len(self.server.files[name])}</Size>'
            "</Contents>"
            for name in page
        )
        prefixes = (
            ""
            if start
            else "".join(
                f"<CommonPrefixes><Prefix>{escape(folder[len(head) :])}</Prefix></CommonPrefixes>" for folder in folders
            )
        )
        token = f"<NextContinuationToken>{start + 3}</NextContinuationToken>" if more else ""
        body = f"<ListBucketResult>{contents}{prefixes}{token}<IsTruncated>{str(more).lower()}</IsTruncated>"
        self.answer(200, f"{body}</ListBucketResult>".encode())

    def put(self) -> None:
        path, _, query = self.path.partition("?")
        asked = dict(parse_qsl(query, True))
        copied = self.headers.get("x-amz-copy-source") or self.headers.get("x-goog-copy-source")
        data = self.body
        if copied is not None:
            source = f"/{unquote(copied).lstrip('/')}"
            if source not in self.server.files:
                self.answer(404)
                return
            data = self.server.files[source]
        elif self.headers.get("x-amz-content-sha256") not in (None, hashlib.sha256(data).hexdigest()):
            self.answer(400, b"<Error><Code>XAmzContentSHA256Mismatch</Code></Error>")
            return
        tag = f'"{md5(data).hexdigest()}"'
        if "partNumber" in asked:
            if asked["uploadId"] not in self.parts:
                self.answer(404)
                return
            self.parts[asked["uploadId"]][1][int(asked["partNumber"])] = data
        elif not self.publish(unquote(path), data):
            return
        kind = "CopyPartResult" if "partNumber" in asked else "CopyObjectResult"
        body = f"<{kind}><ETag>{escape(tag)}</ETag></{kind}>".encode() if copied is not None else b""
        self.answer(200, body, {"ETag": tag})

    def publish(self, path: str, data: bytes) -> bool:
        """Give an object its name, unless it was to be new and is not."""
        with self.server.lock:
            is_new = self.headers.get("If-None-Match") == "*" or self.headers.get("x-goog-if-generation-match") == "0"
            if is_new and path in self.server.files:
                taken = True
            else:
                taken = False
                self.server.files[path] = data
        if taken:
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        return not taken

    def post(self) -> None:
        path, _, query = self.path.partition("?")
        asked = dict(parse_qsl(query, True))
        if "uploads" in asked:
            name = f"upload-{len(self.log)}"
            self.parts[name] = unquote(path), {}
            result = f"<UploadId>{name}</UploadId>"
            self.answer(200, f"<InitiateMultipartUploadResult>{result}</InitiateMultipartUploadResult>".encode())
            return
        if "delete" in asked:
            keys = [unescape(one.decode()) for one in re.findall(rb"<Key>(.*?)</Key>", self.body)]
            for key in keys:
                self.server.files.pop(f"{path.rstrip('/')}/{key}", None)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            self.answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
            return
        if asked["uploadId"] not in self.parts:
            self.answer(404)
            return
        numbers = [int(one) for one in re.findall(rb"<PartNumber>(\d+)</PartNumber>", self.body)]
        name, parts = self.parts[asked["uploadId"]]
        small = [number for number in numbers[:-1] if len(parts[number]) < self.least_nbytes]
        if small or sorted(parts) != numbers:
            self.answer(400, b"<Error><Code>EntityTooSmall</Code></Error>")
        elif self.publish(name, b"".join(parts[number] for number in numbers)):
            del self.parts[asked["uploadId"]]
            self.answer(200, b'<CompleteMultipartUploadResult><ETag>"x"</ETag></CompleteMultipartUploadResult>')

    def delete(self) -> None:
        path, _, query = self.path.partition("?")
        upload = dict(parse_qsl(query, True)).get("uploadId")
        if upload is not None:
            self.parts.pop(upload, None)
        else:
            self.server.files.pop(unquote(path), None)
        self.answer(204)


@contextmanager
def bucket(files: dict[str, bytes]) -> Iterator[tuple[Server, type[Bucket]]]:
    """Keep objects until the block ends; the second has the log of requests and the uploads that are under way."""
    kind = type("Kept", (Bucket,), {"parts": {}, "log": []})
    with serving(files, kind) as server:
        checks_keys(server)
        yield server, kind
