"""A site of this machine that misbehaves in every way that the browser room must survive."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

BUTTON = '<button id=b style="position:absolute;left:0;top:0;width:300px;height:200px" onclick="{}">go</button>'
PAGES = {
    "index": "<title>index</title>hello",
    "alert": BUTTON.format("alert('watch out'); document.title = 'after'"),
    "confirm": BUTTON.format("document.title = String(confirm('sure?'))"),
    "prompt": BUTTON.format("document.title = String(prompt('name?'))"),
    "alerts": BUTTON.format("for (let i = 0; i < 40; i++) alert(i); document.title = 'after'"),
    "leaving": "<script>addEventListener('beforeunload', e => { e.preventDefault(); e.returnValue = 'x'; });</script>"
    + BUTTON.format("document.title = 'touched'"),
    "print": BUTTON.format("print(); document.title = 'after'"),
    "tab": '<title>opener</title><a href="/closing" target=_blank style="position:absolute;inset:0">open</a>',
    "closing": "<title>new tab</title>" + BUTTON.format("window.close()"),
    "storm": BUTTON.format("for (let i = 0; i < 30; i++) window.open('/index?' + i)"),
    "file": '<a href="/attachment" style="position:absolute;inset:0">get</a>',
    "permissions": BUTTON.format(
        "navigator.geolocation.getCurrentPosition(() => { document.title = 'granted' },"
        " e => { document.title = 'denied ' + e.code });"
        " Notification.requestPermission().then(p => { window.asked = p });"
    ),
    "chooser": "<title>chooser</title><input type=file style='position:absolute;inset:0'>",
    "hang": BUTTON.format("for (;;) {}"),
    "circle": "<script>setTimeout(() => { location.href = '/circle?' + Math.random(); }, 0)</script>",
    "huge": "<script>document.write('<p>line of text</p>'.repeat(100000)); document.title = 'huge'</script>",
    "growing": "<script>setInterval(() => document.body.append('x'), 5)</script><title>growing</title>",
    "slow": '<title>slow</title><a href="/late" style="position:absolute;inset:0">late</a>',
    "late": "<title>late</title>arrived",
    "moving": "<title>moving</title><style>@keyframes m {to {left: 100px}} #m {position: absolute; left: 0;"
    " animation: m .5s forwards}</style><div id=m>here</div>",
    "login": "<title>login</title><input type=password style='position:absolute;left:0;top:0;width:300px;height:100px'>"
    "<input id=plain style='position:absolute;left:0;top:100px;width:300px;height:100px'>",
    "storage": "<script>document.title = [document.cookie, localStorage.getItem('k')].join('|');"
    " document.cookie = 'k=1; max-age=999'; localStorage.setItem('k', 'v')</script>",
    "worker": "<script>navigator.serviceWorker?.register('/sw.js').then(() => { document.title = 'registered' },"
    " () => { document.title = 'refused' })</script>",
}


class FaultSite:
    """`heard`: paths that were asked for, in order."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.url = self.secure_url = ""
        self.port = 0

    async def _page(self, request: web.Request) -> web.StreamResponse:
        name = request.path.strip("/")
        self.heard.append(request.path_qs)
        if name == "late":
            await asyncio.sleep(0.8)
        if name == "redirect":
            raise web.HTTPFound(f"/redirect?{request.query_string}1")
        if name == "to":
            raise web.HTTPFound(request.query["url"])
        if name == "attachment":
            return web.Response(body=b"x" * 1000, headers={"Content-Disposition": "attachment; filename=a.bin"})
        if name == "forbidden":
            raise web.HTTPForbidden(text="no robots")
        if name == "sw.js":
            return web.Response(text="", content_type="text/javascript")
        if name == "frame":
            return web.Response(
                text=f"<iframe src='{request.query['url']}' style='border:0;width:300px;height:200px'></iframe>"
                "<style>body{margin:0}</style>",
                content_type="text/html",
            )
        if name not in PAGES:
            raise web.HTTPNotFound
        return web.Response(text=PAGES[name], content_type="text/html")

    @asynccontextmanager
    async def serving(self, folder: Path) -> AsyncIterator[FaultSite]:
        """Listen on two free ports of loopback, one with a certificate that nobody signed."""
        app = web.Application()
        app.router.add_get("/{tail:.*}", self._page)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate(folder))
        plain, secure = web.TCPSite(runner, "127.0.0.1", 0), web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await plain.start()
        await secure.start()
        self.port, secure_port = (address[1] for address in runner.addresses)
        self.url, self.secure_url = f"http://localhost:{self.port}", f"https://localhost:{secure_port}"
        try:
            yield self
        finally:
            await runner.cleanup()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed one: file of the certificate, file of the key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=60)
    return cert, key
