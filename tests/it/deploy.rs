//! What `deploy/` and its documents tell operators: configurations, manifests, the unit, the commands, and the steps.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::support::client::post;
use crate::support::orders::Orders;
use crate::support::postgres::{Cluster, command as of_postgres};
use crate::support::process::{self, Gateway, free_port};
use crate::support::python::script;

const SECRET: &str = "whsec_b25jZWdhdGUgZGVtbzogbm90IGEgc2VjcmV0ISEhISE=";
const DEPLOY: &str = include_str!("../../docs/deploy.md");
const RUNBOOK: &str = include_str!("../../docs/runbook.md");

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files(folder: &Path, name: &str, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, name, into);
        } else if path.file_name().is_some_and(|found| found == name) {
            into.push(path);
        }
    }
}

/// Runs the program with the secrets and variables that the manifests give it.
fn oncegate(args: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .args(args)
        .env("SINK_SECRET", SECRET)
        .env("PGPASSWORD", "demo")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

#[test]
fn check_takes_each_configuration_that_is_deployed() {
    let mut configs = Vec::new();
    files(&root().join("deploy"), "oncegate.toml", &mut configs);
    assert!(configs.len() >= 3, "{configs:?}");
    configs.push(root().join("config/sidecar.toml"));
    for config in configs {
        // The folders that a pod has.
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().to_str().unwrap();
        for (name, text) in
            [("admin-token", "t"), ("sink-secret", SECRET), ("postgres-password", "p")]
        {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let text = std::fs::read_to_string(&config).unwrap();
        let text = text
            .replace("/run/secrets/oncegate", place)
            .replace("/var/lib/oncegate", place)
            .replace("sqlite:oncegate.db", &format!("sqlite:{place}/oncegate.db"))
            // Nobody there: a name that does not resolve takes a while to say so.
            .replace("@postgres:5432", "@127.0.0.1:1");
        let file = process::config(folder.path(), &text);
        let (code, told) = oncegate(&["check", "--config", file.to_str().unwrap()]);
        let shown = config.display();
        assert_eq!(code, 0, "{shown}: {told}");
        // A file cannot know who sets the tenant's header, what stands between, and how many replicas there are.
        let known =
            ["policy.tenant: ", "policy.forward_key: ", "store.url: sqlite serves one replica"]
                .map(|known| format!("warning: {known}"));
        let warnings = told.lines().filter(|line| line.starts_with("warning: "));
        for warning in warnings {
            assert!(
                known.iter().any(|known| warning.starts_with(known.as_str())),
                "{shown}: {warning}"
            );
        }
        assert!(told.contains("ok: 1 route, "), "{shown}: {told}");
    }
}

#[test]
fn manifests_fit_their_schemas_and_each_other_and_the_program_takes_their_commands() {
    let output = script("manifests.py").output().unwrap();
    let told = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success(), "{told}");
    let mut commands = 0;
    for line in told.lines() {
        let Some(command) = line.strip_prefix("command ") else {
            eprintln!("{line}");
            continue;
        };
        let args: Vec<&str> = command.split(' ').skip(1).chain(["--help"]).collect();
        let (code, told) = oncegate(&args);
        assert_eq!(code, 0, "{command}: {told}");
        commands += 1;
    }
    assert!(commands >= 5, "{told}");
}

/// What `deploy/compose.yaml` runs, as processes of this machine.
struct Parts {
    api: (Child, u16),
    consumer: (Child, u16),
}

impl Parts {
    fn start() -> Self {
        let part = |name: &str| {
            let port = free_port();
            let listen = format!("127.0.0.1:{port}");
            let child = Command::new(env!("CARGO_BIN_EXE_oncegate"))
                .args(["demo", name, "--listen", &listen])
                .env("SINK_SECRET", SECRET)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            (child, port)
        };
        Self { api: part("api"), consumer: part("consumer") }
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        for part in [&mut self.api.0, &mut self.consumer.0] {
            let _ = part.kill();
            let _ = part.wait();
        }
    }
}

#[test]
fn the_cases_of_the_demo_are_played_on_the_parts_of_compose() {
    let (cluster, folder) = (Cluster::shared(), tempfile::tempdir().unwrap());
    let mut parts = Parts::start();
    let text = std::fs::read_to_string(root().join("deploy/compose/oncegate.toml")).unwrap();
    let place = folder.path().display();
    let text = text
        .replace("api:3000", &format!("127.0.0.1:{}", parts.api.1))
        .replace("consumer:4000", &format!("127.0.0.1:{}", parts.consumer.1))
        .replace("postgres://oncegate@postgres:5432/oncegate", &cluster.database())
        .replace("[store]\n", &format!("[store]\nspill = {{ dir = \"{place}/spill\" }}\n"))
        .replace("secret_env = \"SINK_SECRET\"", &format!("secret = \"{SECRET}\""));
    let text =
        format!("[server]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"127.0.0.1:0\"\n{text}");
    let file = process::config(folder.path(), &text);
    let gateway = Gateway::start(&file);
    let play = |gateway: &Gateway| {
        let (api, consumer) = (parts.api.1, parts.consumer.1);
        let at = |port| format!("127.0.0.1:{port}");
        oncegate(&[
            "demo",
            "cases",
            "--config",
            file.to_str().unwrap(),
            "--gateway",
            &gateway.addr.to_string(),
            "--api",
            &at(api),
            "--consumer",
            &at(consumer),
        ])
    };
    // Twice on one store: each run has keys of its own.
    for _ in 0..2 {
        let (code, told) = play(&gateway);
        assert_eq!(code, 0, "{told}\n{}", gateway.log());
        assert!(
            told.contains("The consumer took 10 events under 10 ids; 0 signatures were wrong.")
        );
        assert!(told.ends_with("All cases held.\n"), "{told}");
    }
    // A gateway that only observes holds no case: the cases can tell.
    drop(gateway);
    let policy = "[policy]\nmode = \"observe\"\n";
    std::fs::write(&file, text.replace("[policy]\n", policy)).unwrap();
    let (code, told) = play(&Gateway::start(&file));
    assert_eq!(code, 1, "{told}");
    assert!(told.ends_with("A CASE DID NOT HOLD.\n"), "{told}");
    // The first process of a container has to listen for SIGTERM itself.
    process::signal(parts.api.0.id(), "TERM");
    assert!(process::ended(&mut parts.api.0).is_some_and(|status| status.success()));
}

#[test]
fn the_unit_is_valid_and_hardened() {
    let has = Command::new("systemd-analyze").arg("--version").stdout(Stdio::null()).status();
    if !has.is_ok_and(|status| status.success()) {
        eprintln!("not checked: there is no systemd-analyze, which judges the unit");
        return;
    }
    let unit = std::fs::read_to_string(root().join("deploy/systemd/oncegate.service")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("oncegate.service");
    let program = env!("CARGO_BIN_EXE_oncegate");
    std::fs::write(&file, unit.replace("/usr/local/bin/oncegate", program)).unwrap();
    let analyze = |args: &[&str]| {
        let output = Command::new("systemd-analyze").args(args).arg(&file).output().unwrap();
        let told = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(told).unwrap())
    };
    assert_eq!(analyze(&["verify"]), (true, String::new()));
    let (holds, told) = analyze(&["security", "--offline=true", "--threshold=20"]);
    assert!(holds, "{told}");
    // It ends the process later than the process ends by itself.
    assert!(unit.contains("TimeoutStopSec=45s"));
}

/// The sections that begin with `opening`, each with its text.
fn sections<'t>(text: &'t str, opening: &str) -> Vec<(&'t str, &'t str)> {
    let parts = text.split(opening).skip(1);
    parts.map(|part| part.split_once('\n').unwrap()).collect()
}

#[test]
fn each_alert_has_its_five_lines_in_the_runbook() {
    let rules = std::fs::read_to_string(root().join("deploy/prometheus/alerts.yaml")).unwrap();
    let alerts: BTreeSet<&str> =
        rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    let told = sections(RUNBOOK, "\n### ");
    assert_eq!(told.iter().map(|(name, _)| *name).collect::<BTreeSet<_>>(), alerts);
    for (name, text) in told {
        for number in 1..=6 {
            let line = format!("\n{number}. ");
            assert_eq!(text.matches(&line).count(), usize::from(number < 6), "{name}: {number}.");
        }
        let anchor = format!("docs/runbook.md#{}\n", name.to_lowercase());
        assert!(rules.contains(&anchor), "{name}: {anchor}");
    }
}

/// The commands of ours in a text: the words up to the first that is none of a command, and all options.
fn commands(text: &str) -> BTreeSet<(Vec<String>, Vec<String>)> {
    let mut found = BTreeSet::new();
    let pieces = text.split(['`', '\n', '|']).filter_map(|piece| {
        let (before, command) = piece.rsplit_once("oncegate ")?;
        (before.is_empty() || before.ends_with(' ')).then_some(command)
    });
    for command in pieces {
        let words: Vec<&str> = command.split_whitespace().collect();
        let name = |word: &&&str| word.bytes().all(|byte| byte.is_ascii_lowercase());
        let names = words.iter().take_while(name).map(|word| (*word).to_owned());
        let options = words.iter().filter(|word| word.starts_with("--"));
        let options: Vec<String> = options.map(|word| (*word).to_owned()).collect();
        let names: Vec<String> = names.collect();
        if !names.is_empty() {
            found.insert((names, options));
        }
    }
    found
}

#[test]
fn the_program_knows_the_commands_of_runbook_and_deployment() {
    let all = commands(RUNBOOK).into_iter().chain(commands(DEPLOY)).collect::<BTreeSet<_>>();
    assert!(all.len() > 15, "{all:?}");
    for (names, options) in all {
        let shown = names.join(" ");
        let args: Vec<&str> = names.iter().map(String::as_str).chain(["--help"]).collect();
        let (code, help) = oncegate(&args);
        assert_eq!(code, 0, "oncegate {shown}: {help}");
        for option in options {
            assert!(
                help.contains(&format!("{option} ")) || help.contains(&format!("{option}\n")),
                "{shown} {option}: {help}"
            );
        }
    }
}

/// A gateway on a database of its own, with its URL.
fn fleet(orders: &Orders, cluster: &Cluster, folder: &Path) -> (Gateway, String) {
    let url = cluster.database();
    std::fs::create_dir(folder).unwrap();
    let spill = folder.join("spill");
    let toml = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"127.0.0.1:0\"\n[upstream]\nurl = \"{}\"\n[store]\nurl = \"{url}\"\nspill = {{ dir = \"{}\" }}\n[policy]\ntenant = {{ header = \"X-Tenant-Id\" }}\n[[route]]\nmethod = \"POST\"\npath = \"/orders\"\n",
        orders.url(),
        spill.display()
    );
    (Gateway::start(&process::config(folder, &toml)), url)
}

#[tokio::test]
async fn an_idle_tenant_moves_to_another_database_as_the_document_says() {
    const ORDERS: usize = 25;
    let orders = Orders::start().await;
    let (cluster, folder) = (Cluster::shared(), tempfile::tempdir().unwrap());
    let (old, old_url) = fleet(&orders, cluster, &folder.path().join("old"));
    let (new, new_url) = fleet(&orders, cluster, &folder.path().join("new"));
    let send = async |to: &Gateway, tenant: &str, key: usize| {
        post("/orders", "{}").tenant(tenant).key(&format!("k-{key}")).to(to.addr).await
    };
    let mut answers = Vec::new();
    for key in 0..ORDERS {
        answers.push(send(&old, "acme", key).await.body);
        send(&old, "globex", key).await;
    }
    let executed = orders.runs();
    let begin = "psql \"$OLD\"";
    let blocks = DEPLOY.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let block = blocks.into_iter().find(|block| block.starts_with(begin)).unwrap();
    let psql = of_postgres("psql").get_program().to_owned();
    let bin = Path::new(&psql).parent().unwrap().display().to_string();
    let path = std::env::var("PATH").unwrap();
    let moved = Command::new("sh")
        .args(["-euc", block])
        .env("PATH", format!("{bin}:{path}"))
        .env("OLD", &old_url)
        .env("NEW", &new_url)
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert!(moved.status.success(), "{}", String::from_utf8_lossy(&moved.stderr));
    for (key, answer) in (0..).zip(&answers) {
        let replay = send(&new, "acme", key).await;
        assert!(replay.replayed(), "k-{key}");
        assert_eq!(&replay.body, answer);
    }
    assert_eq!(orders.runs(), executed, "all of them are replays");
    // What was not copied is executed again: that is why it is.
    for key in 0..ORDERS {
        assert!(!send(&new, "globex", key).await.replayed());
    }
    assert_eq!(orders.runs(), executed + ORDERS);
}
