//! The program as a container engine runs it: asked for its health, with a configuration in a folder that it does not write.

use std::path::Path;

use crate::support::orders::Orders;
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway, eventually, free_port};

/// `serve` on this store with an admin listener that can be asked; its port.
fn toml(upstream: &str, store: &str, more: &str) -> (String, u16) {
    let admin = free_port();
    let toml = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"127.0.0.1:{admin}\"\n[upstream]\nurl = \"{upstream}\"\n[store]\nurl = \"{store}\"\n{more}[[route]]\nmethod = \"POST\"\npath = \"/orders\"\n"
    );
    (toml, admin)
}

fn health(config: &Path, more: &[&str]) -> (i32, String, String) {
    let config = config.to_str().unwrap();
    process::run(&[&["health", "--config", config], more].concat())
}

#[tokio::test]
async fn health_says_whether_the_process_runs_and_with_ready_whether_it_serves() {
    let orders = Orders::start().await;
    let cluster = Cluster::own();
    let folder = tempfile::tempdir().unwrap();
    let (mut text, admin) = toml(&orders.url(), &cluster.url("postgres"), "lease = \"3s\"\n");
    let file = process::config(folder.path(), &text);
    let (code, out, errors) = health(&file, &[]);
    assert_eq!((code, out.as_str()), (1, ""), "nothing runs: {errors}");
    let begin = format!("oncegate: http://127.0.0.1:{admin}/healthz: cannot connect: ");
    assert!(errors.starts_with(&begin), "{errors}");

    let mut gateway = Gateway::start(&file);
    assert_eq!(health(&file, &[]).0, 0);
    assert_eq!(health(&file, &["--ready"]).0, 0);
    // A mistake in a file that was edited under the process is not one of the process.
    text.push_str("pathh = \"/a\"\n");
    std::fs::write(&file, &text).unwrap();
    assert_eq!(process::run(&["check", "--config", file.to_str().unwrap()]).0, 2);
    assert_eq!(health(&file, &[]).0, 0);

    cluster.stop_at_once();
    eventually("it is not ready", || async { health(&file, &["--ready"]).0 == 1 }).await;
    let (_, _, errors) = health(&file, &["--ready"]);
    assert!(errors.contains("/readyz: 503 Service Unavailable: {"), "{errors}");
    assert_eq!(health(&file, &[]).0, 0, "its database is away, and it runs");

    gateway.signal("STOP");
    let (code, _, errors) = health(&file, &["--timeout", "200ms"]);
    assert_eq!(code, 1);
    assert!(errors.ends_with("/healthz: no answer within 200ms\n"), "{errors}");
    gateway.kill9();
    assert_eq!(health(&file, &[]).0, 1);
}

#[test]
fn health_never_has_a_status_that_engines_do_not_know() {
    let (code, _, errors) = process::run(&["health", "--config", "/there/is/none.toml"]);
    assert_eq!(code, 1);
    assert!(errors.contains("/there/is/none.toml: cannot read the file: "), "{errors}");
}

#[tokio::test]
async fn on_postgres_nothing_is_written_beside_the_configuration() {
    let orders = Orders::start().await;
    let (cluster, folder) = (Cluster::shared(), tempfile::tempdir().unwrap());
    let spill = folder.path().join("spill");
    let more = format!("spill = {{ dir = \"{}\" }}\n", spill.display());
    let etc = folder.path().join("etc");
    std::fs::create_dir(&etc).unwrap();
    let (text, _) = toml(&orders.url(), &cluster.database(), &more);
    let file = process::config(&etc, &text);
    let gateway = Gateway::start(&file);
    let there: Vec<_> = std::fs::read_dir(&etc).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(there, [file], "{}", gateway.log());
}

#[tokio::test]
async fn a_digest_key_that_cannot_be_had_is_named_by_check_and_by_serve() {
    let orders = Orders::start().await;
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("oncegate.key");
    std::fs::create_dir(&key).unwrap();
    let store = format!("sqlite:{}", folder.path().join("o.db").display());
    let file = process::config(folder.path(), &toml(&orders.url(), &store, "").0);
    let file = file.to_str().unwrap();
    let wanted = format!(
        "oncegate: cannot read the digest key {} (server.digest_key_file names another file): Is a directory",
        key.display()
    );
    for (command, status) in [("check", 2), ("serve", 1)] {
        let (code, _, errors) = process::run(&[command, "--config", file]);
        assert_eq!(code, status, "{command}: {errors}");
        assert!(errors.lines().last().unwrap().starts_with(&wanted), "{command}: {errors}");
    }
}
