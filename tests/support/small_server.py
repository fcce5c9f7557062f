"""Serves bytes on this machine."""

import contextlib
import http.server
import threading
import urllib.request


class Server:
    """Holds what is served. files: path -> bytes. asked: the paths asked for, in order."""

    def __init__(self, files):
        self.files, self.asked = files, []


def reach_this_machine(monkeypatch):
    """Lets downloads reach a server here, whatever proxy there is."""
    for name in ('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(urllib.request, '_opener', None)  # it keeps the proxy of its first use


@contextlib.contextmanager
def serving(files):
    """Within this context, serves files by HTTP; yields (Server, address of the folder)."""
    served = Server(files)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            served.asked.append(self.path)
            content = served.files.get(self.path)
            self.send_response(404 if content is None else 200)
            content = content or b''
            self.send_header('Content-Length', str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(('127.0.0.1', 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield served, 'http://127.0.0.1:{}'.format(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
