"""Checks deploy/kubernetes and deploy/compose.yaml: the schemas of Kubernetes, and that each part names what another one has.

Where kubectl is there, what it makes of the kustomizations is checked as well. Its last lines say what was not checked, and each
command of a container of ours: `command NAME ARGS...`, for the test to try.
"""

import pathlib
import shutil
import subprocess
import sys
import tomllib

import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
KUBERNETES = ROOT / "deploy/kubernetes"
VERSIONS = ("1.31", "1.37")
OURS = 10001
MIB = 1 << 20
wrong = []


def expect(holds, what):
    if not holds:
        wrong.append(what)


def bytes_of(text):
    number = text.rstrip("KMGiB")
    return int(number) * {"Ki": 1 << 10, "Mi": MIB, "Gi": 1 << 30}[text[len(number):].removesuffix("B")]


def seconds(text):
    return int(text.removesuffix("s"))


def of_schema(name, manifests):
    for manifest in manifests:
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                wrong.append(f"{name}, {manifest['kind']}, Kubernetes {version}: {error.path}: {error.message}")


def one(manifests, kind):
    found = [manifest for manifest in manifests if manifest["kind"] == kind]
    expect(len(found) == 1, f"one {kind}, not {len(found)}")
    return found[0]


def hardened(name, pod, container):
    context, own = pod["securityContext"], container["securityContext"]
    for field in ("runAsUser", "runAsGroup", "fsGroup"):
        expect(context[field] == OURS, f"{name}: {field}")
    expect(context["runAsNonRoot"] and context["seccompProfile"] == {"type": "RuntimeDefault"}, f"{name}: {context}")
    expect(not own["allowPrivilegeEscalation"] and own["readOnlyRootFilesystem"], f"{name}: {own}")
    expect(own["capabilities"] == {"drop": ["ALL"]}, f"{name}: {own}")
    expect(not pod["automountServiceAccountToken"], f"{name}: it needs no token of the cluster")


def asked(name, container, config):
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        expect(container[probe]["httpGet"] == {"path": path, "port": "admin"}, f"{name}: {probe}")
    for port, listen in (("http", config["server"]["listen"]), ("admin", config["admin"]["listen"])):
        expect(listen == f"0.0.0.0:{ports[port]}", f"{name}: the port {port} is {ports[port]}, and it listens on {listen}")


def has_room(name, pod, container, config):
    server, store = config["server"], config["store"]
    needed = bytes_of(server["buffered_bytes_max"]) + bytes_of(store.get("cache_bytes", "64MiB")) * 3 // 2 + 64 * MIB
    limit = bytes_of(container["resources"]["limits"]["memory"])
    expect(limit >= needed, f"{name}: {limit} bytes of memory, and {needed} may be needed")
    expect("cpu" not in container["resources"]["limits"], f"{name}: a limit for processor time")
    stop = seconds(server.get("shutdown_delay", "0s")) + seconds(server.get("shutdown_grace", "30s")) + 5
    expect(pod["terminationGracePeriodSeconds"] >= stop, f"{name}: a stop may take {stop} s")


def mounted(name, pod, container, text):
    """Each path that the configuration names is in a volume of the pod."""
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    expect(set(mounts) == {"/etc/oncegate", "/run/secrets/oncegate", "/var/lib/oncegate"}, f"{name}: {sorted(mounts)}")
    volumes = {volume["name"] for volume in pod["volumes"]}
    expect({mount["name"] for mount in mounts.values()} == volumes, f"{name}: {volumes}")
    for word in text.split('"'):
        if word.startswith("/run/") or word.startswith("/var/"):
            expect(any(word.startswith(f"{path}/") for path in mounts), f"{name}: nothing is mounted for {word}")


def selected(name, manifests, template):
    labels, ports = template["metadata"]["labels"], set()
    for container in template["spec"]["containers"]:
        ports |= {port.get("name") for port in container["ports"]}
    for manifest in manifests:
        if manifest["kind"] == "Service":
            selector = manifest["spec"]["selector"]
            targets = {port["targetPort"] for port in manifest["spec"]["ports"]}
            expect(targets <= ports, f"{name}: the Service asks for {targets}, the pod has {ports}")
        elif manifest["kind"] in ("Deployment", "PodDisruptionBudget"):
            selector = manifest["spec"]["selector"]["matchLabels"]
        else:
            continue
        expect(selector.items() <= labels.items(), f"{name}: {manifest['kind']} selects {selector}, not {labels}")


def kustomized(folder):
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    manifests = []
    for resource in kustomization["resources"]:
        manifests += list(yaml.safe_load_all((folder / resource).read_text()))
    images = {image["name"] for image in kustomization["images"]}
    name = folder.name
    of_schema(name, manifests)
    deployment = one(manifests, "Deployment")
    budget = one(manifests, "PodDisruptionBudget")["spec"]
    expect(deployment["spec"]["replicas"] >= 2 and budget["maxUnavailable"] == 1, f"{name}: one replica is always there")
    template = deployment["spec"]["template"]
    pod = template["spec"]
    containers = {container["name"]: container for container in pod["containers"]}
    expect({container["image"] for container in pod["containers"]} <= images, f"{name}: an image without a registry")
    text = (folder / "oncegate.toml").read_text()
    config, container = tomllib.loads(text), containers["oncegate"]
    hardened(name, pod, container)
    asked(name, container, config)
    has_room(name, pod, container, config)
    mounted(name, pod, container, text)
    selected(name, manifests, template)
    made = {generator["name"] for generator in kustomization["configMapGenerator"]}
    used = {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
    expect(made == used, f"{name}: {made} is made, {used} is mounted")


def built(folder):
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    expect(done.returncode == 0, f"{folder.name}: {done.stderr}")
    of_schema(f"{folder.name} as built", [m for m in yaml.safe_load_all(done.stdout) if m])


def composed():
    path = ROOT / "deploy/compose.yaml"
    compose = yaml.safe_load(path.read_text())
    services = compose["services"]
    for name, service in services.items():
        for other in service.get("depends_on", {}):
            expect(other in services, f"compose: {name} waits for {other}, which is not there")
            healthy = service["depends_on"][other]["condition"] == "service_healthy"
            expect(not healthy or services[other]["healthcheck"].get("test"), f"compose: nobody asks {other} for its health")
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            there = source in compose["volumes"] or (path.parent / source).is_file()
            expect(there, f"compose: {name}: there is no {source}")
        if service["image"] == "oncegate:demo":
            expect(service["read_only"] and service["cap_drop"] == ["ALL"], f"compose: {name} is not hardened")
            command = service.get("command", ["serve"])
            print("command", name, *command)
    health = services["oncegate"]["healthcheck"]["test"]
    print("command", "healthcheck", *health[2:])


for folder in sorted(path.parent for path in KUBERNETES.glob("*/kustomization.yaml")):
    kustomized(folder)
    if shutil.which("kubectl"):
        built(folder)
if not shutil.which("kubectl"):
    print("not checked: there is no kubectl, which makes manifests of the kustomizations")
composed()
sys.exit("\n".join(wrong) if wrong else 0)
