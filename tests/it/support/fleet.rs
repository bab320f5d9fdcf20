//! What tests with several processes, a sink and kills share.

use std::net::SocketAddr;

use super::client::{Answer, Ask, get, post};
use super::process::{self, Gateway};
use super::rig::{self, Place};
use super::sink::SECRET;

/// Lines for a sink on this port, with short times, so that what a killed relay had claimed is soon free again.
pub(crate) fn sink(port: u16) -> String {
    format!(
        r#"
[[sink]]
name = "main"
url = "http://127.0.0.1:{port}/hook"
secret = "{SECRET}"
timeout = "2s"
allow_private = true
backoff = {{ base = "100ms", max = "500ms" }}
"#
    )
}

/// Two events of each new order.
pub(crate) const TWO_EVENTS: &str = r#"
[[route.event]]
type = "order.created"
when = "response.status == 201"
payload = { order_id = "{{ response.json.id }}" }
[[route.event]]
type = "audit.order"
"#;

/// One event of each new order.
pub(crate) const ONE_EVENT: &str = r#"
[[route.event]]
type = "order.created"
payload = { order_id = "{{ response.json.id }}" }
"#;

/// The request of all these tests.
pub(crate) fn order(key: &str) -> Ask {
    post("/orders", r#"{"customer":"c-1","amount":"129.90"}"#).tenant("acme").key(key)
}

/// Replicas on one database, with a lease of three seconds and a sweeper that looks often.
pub(crate) fn replicas(
    count: usize,
    place: &Place,
    upstream: &str,
    policy: &str,
    more: &str,
) -> Vec<Gateway> {
    let store = "lease = \"3s\"\nsweep_every = \"500ms\"";
    let toml = rig::config_at(place, upstream, "127.0.0.1:0", store, policy, more);
    let config = process::config(place.folder.path(), &toml);
    (0..count).map(|_| Gateway::start(&config)).collect()
}

/// A request that runs beside the test.
pub(crate) fn sending(ask: Ask, to: SocketAddr) -> tokio::task::JoinHandle<Answer> {
    tokio::spawn(async move { ask.to(to).await })
}

/// A metric without labels.
pub(crate) async fn metric(admin: SocketAddr, name: &str) -> i64 {
    let text = get("/metrics").to(admin).await.body;
    let text = String::from_utf8_lossy(&text).into_owned();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in\n{text}"))
}

/// A command of the program with a gateway's configuration: exit status, output, errors.
pub(crate) fn command(gateway: &Gateway, args: &[&str]) -> (i32, String, String) {
    let config = gateway.config.to_str().expect("a path of text");
    process::run(&[args, &["--config", config]].concat())
}

/// The ids in `records list` with this status.
pub(crate) fn listed(gateway: &Gateway, status: &str) -> Vec<String> {
    let (code, out, errors) =
        command(gateway, &["records", "list", "--status", status, "--json", "--limit", "1000"]);
    assert_eq!(code, 0, "{errors}");
    let list: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    let rows = list["records"].as_array().expect("records");
    rows.iter().map(|row| row["id"].as_str().expect("an id").to_owned()).collect()
}
