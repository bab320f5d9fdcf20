"""Runs the image that tests/image.sh has built, by crun, in a network of its own: as its user, with a read-only root. Then the
services of deploy/compose.yaml, with its commands and variables."""

import http.server
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import yaml

work, pgbin = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
STORE = ["--root", work / "storage", "--runroot", work / "run", "--storage-driver", "vfs"]
PATIENCE = 30
OURS = 10001
ROOT = pathlib.Path(__file__).resolve().parent.parent
HOSTS = work / "hosts"


def out(*command, **options):
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, **options).stdout


def buildah(*args):
    return out("buildah", *STORE, *args)


def check(holds, what):
    if not holds:
        sys.exit(f"FAILED: {what}")
    print("ok:", what)


class Container:
    """What an engine makes of an image and `docker run --read-only -v VOLUME:... -v ETC:/etc/oncegate:ro`."""

    all = []

    def __init__(self, name, image, etc, volume, command=None, env=()):
        self.name, self.log = name, work / f"{name}.log"
        Container.all.append(self)
        self.crun("delete", "--force", name, check=False)
        bundle = work / "bundle" / name
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.mkdir(parents=True)
        self.user = image["User"]
        user, group = (int(part) for part in self.user.split(":"))
        bind = lambda source, at, access: {
            "destination": at, "source": str(source), "type": "bind", "options": ["bind", access, "nosuid", "nodev"],
        }
        spec = {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": user, "gid": group},
                "args": image["Entrypoint"] + (command or image["Cmd"]),
                "env": image["Env"] + list(env),
                "cwd": image["WorkingDir"],
                "capabilities": {kind: [] for kind in ("bounding", "effective", "permitted")},
                "noNewPrivileges": True,
            },
            "root": {"path": image["rootfs"], "readonly": True},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
                bind(volume, "/var/lib/oncegate", "rw"),
                bind(etc, "/etc/oncegate", "ro"),
                bind(HOSTS, "/etc/hosts", "ro"),
            ],
            # The network is the test's.
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")]},
        }
        (bundle / "config.json").write_text(json.dumps(spec))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.line("run", "--bundle", bundle, name), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def line(self, *args):
        return ["crun", "--cgroup-manager", "disabled", "--root", work / "crun", *args]

    def crun(self, *args, check=True):
        done = subprocess.run(self.line(*args), text=True, capture_output=True)
        if check and done.returncode:
            sys.exit(f"FAILED: crun {args}: {done.stderr}\n{self.log.read_text()}")
        return done

    def exec(self, *command):
        done = self.crun("exec", "--user", self.user, self.name, *command, check=False)
        return done.returncode, done.stdout.strip() + done.stderr.strip()

    def runs_as(self):
        pid = json.loads(self.crun("state", self.name).stdout)["pid"]
        return os.stat(f"/proc/{pid}").st_uid

    def ready(self):
        """What its ready line says."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            text = self.log.read_text()
            if "ready {" in text:
                return json.loads(text.split("ready ", 1)[1].splitlines()[0])
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        sys.exit(f"FAILED: {self.name} did not become ready:\n{self.log.read_text()}")

    def stop(self, signal):
        """How long it took, and its exit status."""
        begun = time.monotonic()
        self.crun("kill", self.name, signal)
        status = self.process.wait(PATIENCE)
        return time.monotonic() - begun, status


class Api(http.server.BaseHTTPRequestHandler):
    made = 0

    def do_POST(self):
        Api.made += 1
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.dumps({"id": Api.made}).encode()
        self.send_response(201)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def order(key):
    """Status, body, and whether it is a replay."""
    headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
    request = urllib.request.Request("http://127.0.0.1:8080/orders", b'{"amount":"1"}', headers)
    try:
        answer = urllib.request.urlopen(request, timeout=PATIENCE)
    except urllib.error.HTTPError as error:
        answer = error
    return answer.status, answer.read(), answer.headers.get("Idempotent-Replayed") is not None


def postgres():
    """A server of its own; the folder is cleared when the next run begins."""
    data = work / "postgres"
    stop = lambda: subprocess.run(step_down(pgbin / "pg_ctl", "-D", data, "-m", "immediate", "stop"), capture_output=True)
    stop()
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    shutil.chown(data, "postgres", "postgres")
    out(*step_down(pgbin / "initdb", "-D", data, "-A", "trust", "-U", "oncegate"), stderr=subprocess.STDOUT)
    settings = f"-c listen_addresses=127.0.0.1 -c unix_socket_directories={data}"
    out(*step_down(pgbin / "pg_ctl", "-D", data, "-l", data / "log", "-o", settings, "-w", "start"))
    return stop


def step_down(*command):
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *command]


def with_store(image, name, store):
    etc, volume = work / f"{name}-etc", work / f"{name}-volume"
    shutil.rmtree(etc, ignore_errors=True)
    shutil.rmtree(volume, ignore_errors=True)
    etc.mkdir()
    volume.mkdir()
    os.chown(volume, OURS, OURS)
    (etc / "oncegate.toml").write_text(
        f'[upstream]\nurl = "http://127.0.0.1:3000"\n{store}[[route]]\nmethod = "POST"\npath = "/orders"\n'
    )
    container = Container(name, image, etc, volume)
    ready = container.ready()
    check(ready["listen"] == "0.0.0.0:8080", f"{name}: it listens on all addresses where nothing says where: {ready}")
    check((who := container.runs_as()) == OURS, f"{name}: it runs as user {who}")
    check(container.exec("touch", "/tmp/x")[0] != 0, f"{name}: its root file system is read-only")
    before = Api.made
    first = order("k-1")
    check(first[0] == 201 and not first[2], f"{name}: the first request is executed: {first}")
    check(order("k-1") == (201, first[1], True), f"{name}: its retry gets the same answer")
    check(Api.made == before + 1, f"{name}: it was executed once")
    health = image["Healthcheck"]["Test"]
    check(health[0] == "CMD" and container.exec(*health[1:])[0] == 0, f"{name}: the image's health check is content: {health}")
    check(container.exec("oncegate", "health", "--ready")[0] == 0, f"{name}: it is ready")
    took, status = container.stop(image["StopSignal"])
    check(status == 0 and took < 10, f"{name}: SIGTERM ends it with status {status} after {took:.1f} s")
    check(sorted(path.name for path in etc.iterdir()) == ["oncegate.toml"], f"{name}: nothing is written beside its configuration")
    again = Container(name, image, etc, volume)
    again.ready()
    check(order("k-1") == (201, first[1], True), f"{name}: the next container replays what the last one stored")
    again.stop("SIGTERM")


def composed(image):
    """The services of ours, as `docker compose run cases` begins them; Postgres is the test's."""
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    containers = {}
    for name in ("api", "consumer", "oncegate", "cases"):
        service = services[name]
        etc, volume = work / f"compose-{name}-etc", work / f"compose-{name}-volume"
        for folder in (etc, volume):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        os.chown(volume, OURS, OURS)
        for mount in service.get("volumes", []):
            source, at, *_ = mount.split(":")
            if at == "/etc/oncegate/oncegate.toml":
                shutil.copy(ROOT / "deploy" / source, etc / "oncegate.toml")
        env = [f"{variable}={value}" for variable, value in service["environment"].items()]
        containers[name] = Container(f"compose-{name}", image, etc, volume, service.get("command"), env)
        if name == "oncegate":
            containers[name].ready()
            status = containers[name].exec(*service["healthcheck"]["test"][1:])
            check(status[0] == 0, f"compose: its health check waits for the start: {status}")
    status = containers["cases"].process.wait(PATIENCE)
    print(containers["cases"].log.read_text())
    check(status == 0 and "All cases held." in containers["cases"].log.read_text(), "compose: all cases held")
    for name in ("oncegate", "api", "consumer"):
        took, status = containers[name].stop("SIGTERM")
        check(status == 0, f"compose: SIGTERM ends {name} with status {status}")


def main():
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # In this process's view: crun looks which cgroups there are, though it is told to use none, and does not know all kinds.
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/sys/fs/cgroup"], check=True)
    shutil.rmtree(work / "crun", ignore_errors=True)
    api = http.server.ThreadingHTTPServer(("127.0.0.1", 3000), Api)
    threading.Thread(target=api.serve_forever, daemon=True).start()
    HOSTS.write_text("127.0.0.1 localhost api consumer postgres oncegate\n")
    stop = postgres()
    container = buildah("from", "--pull-never", "oncegate:test").strip()
    try:
        config = json.loads(buildah("inspect", "--type", "image", "oncegate:test"))["Docker"]["config"]
        image = {**config, "rootfs": buildah("mount", container).strip()}
        check(image["User"] == "10001:10001", "the image names its user by number")
        labels = image["Labels"]
        check(labels["org.opencontainers.image.version"] == "test", f"the image has its labels: {labels}")
        with_store(image, "sqlite", "")
        with_store(image, "postgres", '[store]\nurl = "postgres://oncegate@127.0.0.1/postgres"\n')
        api.shutdown()
        api.server_close()
        out(pgbin / "createdb", "-h", "127.0.0.1", "-U", "oncegate", "oncegate")
        composed(image)
    finally:
        for begun in Container.all:
            begun.crun("delete", "--force", begun.name, check=False)
        buildah("rm", container)
        stop()
    print("all held")


main()
