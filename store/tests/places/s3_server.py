"""An S3 server for tests: moto's, on a free port of this host.

moto checks `If-None-Match` and stores the object in two steps. Requests are served one at a time here, so
that they are one step, as they are in S3. The first line written is the port. Lines read are commands
("busy 2": the next two requests are answered 503 and do nothing; "lost 2": the next two that write happen and
are answered 503; "unconditional": conditions are ignored from now on; "uploads": how many uploads in parts
are open; "requests": how many were served), each answered by a line. The end of the input ends the server.
"""

import io
import os
import sys
import threading

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import WSGIRequestHandler, make_server


class Faults:
    busy = 0
    lost = 0
    unconditional = False
    served = 0


class OneAtATime:
    def __init__(self, app):
        self.app = app
        self.lock = threading.Lock()

    def __call__(self, environ, start_response):
        # The body first, so that a slow sender holds up nobody.
        length = int(environ.get("CONTENT_LENGTH") or 0)
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
        with self.lock:
            Faults.served += 1
            if Faults.busy > 0:
                Faults.busy -= 1
                return refuse(start_response)
            if Faults.unconditional:
                environ.pop("HTTP_IF_NONE_MATCH", None)
            said = []
            body = b"".join(self.app(environ, lambda *answer: said.append(answer)))
            if environ["REQUEST_METHOD"] in ("PUT", "POST") and Faults.lost > 0:
                Faults.lost -= 1
                return refuse(start_response)
        start_response(*said[0][:2])
        return [body]


def refuse(start_response):
    start_response("503 Slow Down", [("Content-Length", "0")])
    return []


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *arguments):
        pass


def open_uploads():
    buckets = [
        bucket
        for account in s3_backends.values()
        for region in account.values()
        for bucket in region.buckets.values()
    ]
    return sum(len(bucket.multiparts) for bucket in buckets)


def obey(line):
    word, _, number = line.strip().partition(" ")
    if word == "busy":
        Faults.busy = int(number)
    elif word == "lost":
        Faults.lost = int(number)
    elif word == "unconditional":
        Faults.unconditional = True
    elif word == "uploads":
        return open_uploads()
    elif word == "requests":
        return Faults.served
    return "ok"


app = OneAtATime(DomainDispatcherApplication(create_backend_app))
server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
for line in sys.stdin:
    print(obey(line), flush=True)
os._exit(0)
