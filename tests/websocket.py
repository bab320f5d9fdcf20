"""A websocket server, and clients, out of the public library `websockets` from PyPI.

serve           an echo server; writes its port, and ends with its standard input
talk URL        twenty conversations at once; ends with a traceback at the first thing that is not as it must be
stay URL PAUSE  connects again whenever the connection ends; each time it writes "open" after the first message came back, sends
                one more each PAUSE seconds (0: none), and writes "closed" when the connection has ended
"""

import asyncio
import json
import sys

from websockets.asyncio.client import connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed, InvalidHandshake


async def echo(connection):
    said = {"path": connection.request.path, "protocol": connection.subprotocol}
    await connection.send(json.dumps(said))
    try:
        async for message in connection:
            if message == "close":
                await connection.close(4001, "as you like")
                return
            await connection.send(message)
    except ConnectionClosed:
        pass  # As clients end whose gateway has ended.


async def serving():
    async with serve(echo, "127.0.0.1", 0, subprotocols=["chat"], max_size=None) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def talk(url, number):
    target = f"/room?secret={number}"
    offer = {"subprotocols": ["other", "chat"], "compression": None, "max_size": None, "proxy": None}
    async with connect(url + target, **offer) as connection:
        assert connection.subprotocol == "chat"
        first = json.loads(await connection.recv())
        assert first == {"path": target, "protocol": "chat"}, first
        for message in ["", "é", b"\x00\xff", "x" * 1_000_000, bytes(500_000), str(number)]:
            await connection.send(message)
            assert await connection.recv() == message
        await (await connection.ping())
        await connection.send("close")
        try:
            raise AssertionError(await connection.recv())
        except ConnectionClosed as closed:
            assert (closed.rcvd.code, closed.rcvd.reason) == (4001, "as you like"), closed


async def talking(url):
    await asyncio.gather(*(talk(url, number) for number in range(20)))


async def stay(url, pause):
    while True:
        try:
            async with connect(url, subprotocols=["chat"], proxy=None) as connection:
                await connection.recv()
                await connection.send("hello")
                assert await connection.recv() == "hello"
                print("open", flush=True)
                while pause:
                    await asyncio.sleep(pause)
                    await connection.send("more")
                    assert await connection.recv() == "more"
                await connection.recv()
        except ConnectionClosed:
            print("closed", flush=True)
        except (OSError, InvalidHandshake):
            await asyncio.sleep(0.05)


def main():
    what, *rest = sys.argv[1:]
    if what == "serve":
        asyncio.run(serving())
    elif what == "talk":
        asyncio.run(talking(*rest))
    else:
        asyncio.run(stay(rest[0], float(rest[1])))


if __name__ == "__main__":
    main()
