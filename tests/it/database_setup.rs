//! What docs/postgres.md tells administrators to do, done as it stands there: roles, grants, passwords, schemas, TLS.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use oncegate::store::postgres::Postgres;
use oncegate::store::postgres::access::{Access, Additions};
use oncegate::telemetry::causes;
use tempfile::TempDir;

use crate::postgres::settings;
use crate::support::fleet::{TWO_EVENTS, order, sink};
use crate::support::orders::Orders;
use crate::support::postgres::{Cluster, own_folder, server_user};
use crate::support::process::{self, Gateway, eventually};
use crate::support::sink::{OK, Sink};
use crate::webhooks::Authority;

const DOCUMENT: &str = include_str!("../../docs/postgres.md");

/// Runs the statements of the block that begins like this, one after the other.
fn run_documented(cluster: &Cluster, database: &str, role: &str, beginning: &str) {
    let blocks = DOCUMENT.split("```sql\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let block = blocks.into_iter().find(|block| block.starts_with(beginning));
    let block = block.unwrap_or_else(|| panic!("no {beginning} in the document"));
    for statement in block.split_inclusive(";\n") {
        // Each alone: some may not stand in a transaction with others.
        let statement = match role {
            "postgres" => statement.to_owned(),
            _ => format!("SET ROLE {role}; {statement}"),
        };
        cluster.execute(database, &statement);
    }
}

/// A file that only its owner can get at.
fn private(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// A configuration with these lines in its section of the store.
fn toml(orders: &Orders, sink_port: u16, store: &str) -> String {
    format!(
        r#"
[server]
listen = "127.0.0.1:0"
[admin]
listen = "127.0.0.1:0"
[upstream]
url = "{}"
[store]
lease = "3s"
sweep_every = "500ms"
{store}
[policy]
tenant = {{ header = "X-Tenant-Id" }}
[[route]]
method = "POST"
path = "/orders"
operation = "orders.create"
{TWO_EVENTS}
{}
"#,
        orders.url(),
        sink(sink_port)
    )
}

/// A first request, its replay and its events.
async fn works(gateway: &Gateway, key: &str, sink: &Sink, events: usize) {
    assert_eq!(order(key).to(gateway.addr).await.status, 201);
    let again = order(key).to(gateway.addr).await;
    assert_eq!((again.status.as_u16(), again.replayed()), (201, true));
    eventually("its events are delivered", async || sink.ids().len() == events).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_roles_migrate_and_serve_with_passwords_from_files() {
    let cluster = Cluster::own();
    run_documented(&cluster, "postgres", "postgres", "CREATE ROLE oncegate LOGIN");
    cluster.execute("postgres", "ALTER ROLE oncegate CREATEROLE");
    run_documented(&cluster, "oncegate", "oncegate", "CREATE ROLE oncegate_run");
    cluster.ask_for_passwords();
    let (orders, sink) = (Orders::start().await, Sink::start(|_, _| OK).await);
    let folder = TempDir::new().unwrap();
    let at = format!("@127.0.0.1:{}/oncegate", cluster.port());

    private(folder.path(), "owner.password", "change me\n");
    let owner = format!("url = \"postgres://oncegate{at}\"\npassword_file = \"owner.password\"");
    let owner = process::config(folder.path(), &toml(&orders, sink.port, &owner));
    let owner = owner.to_str().unwrap();
    let (code, _, told) = process::run(&["migrate", "--config", owner]);
    assert_eq!(code, 0, "{told}");

    private(folder.path(), "store.url", &format!("postgres://oncegate_run{at}\n"));
    let store = "url_file = \"store.url\"\nmigrate = false";
    let path = process::config(folder.path(), &toml(&orders, sink.port, store));
    let pgpass =
        private(folder.path(), "pgpass", "127.0.0.1:*:oncegate:oncegate_run:change me too\n");
    let mut command = process::serve(&path);
    command.env("PGPASSFILE", pgpass).env_remove("PGPASSWORD");
    let gateway = Gateway::launch(command, &path).unwrap_or_else(|why| panic!("{why}"));
    works(&gateway, "k-1", &sink, 2).await;
    assert!(!gateway.log().contains("permission denied"), "{}", gateway.log());
    gateway.terminate();

    let mut command = process::serve(&path);
    command.env("PGPASSWORD", "wrong");
    let refused = Gateway::launch(command, &path).map(drop).unwrap_err();
    assert!(refused.contains("password authentication failed"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_of_its_own_holds_all_of_the_tables() {
    let cluster = Cluster::own();
    run_documented(&cluster, "postgres", "postgres", "CREATE ROLE oncegate LOGIN");
    let (orders, sink) = (Orders::start().await, Sink::start(|_, _| OK).await);
    let folder = TempDir::new().unwrap();
    let url = format!("postgres://oncegate@127.0.0.1:{}/oncegate", cluster.port());
    let serve = |url: &str| {
        let store = format!("url = \"{url}\"");
        Gateway::start(&process::config(folder.path(), &toml(&orders, sink.port, &store)))
    };
    let tables = |schema: &str| {
        let count = format!("SELECT count(*) FROM pg_tables WHERE schemaname = '{schema}'");
        cluster.ask("oncegate", &count).unwrap().parse::<u32>().unwrap()
    };

    cluster.execute("oncegate", "CREATE SCHEMA by_url AUTHORIZATION oncegate");
    let gateway = serve(&format!("{url}?options=-c%20search_path%3Dby_url"));
    works(&gateway, "k-1", &sink, 2).await;
    assert!(tables("by_url") > 5 && tables("public") == 0);
    gateway.terminate();

    run_documented(&cluster, "oncegate", "postgres", "CREATE SCHEMA gateway");
    let gateway = serve(&url);
    works(&gateway, "k-2", &sink, 4).await;
    assert_eq!((tables("gateway"), tables("public")), (tables("by_url"), 0));
    gateway.terminate();
}

/// What becomes of a connection under this mode, with these roots: none where it works.
async fn refused(port: u16, host: &str, mode: &str, roots: &Path) -> Option<String> {
    let url = format!("postgres://postgres@{host}:{port}/postgres?sslmode={mode}");
    let additions = Additions { ca_file: Some(roots.to_owned()), ..Additions::default() };
    let access = Access::read(&url, &additions).unwrap().0;
    let settings = oncegate::store::postgres::Settings { access, ..settings(&url) };
    let opened = Postgres::open(settings).await;
    opened.err().map(|error| causes(&error))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_checked_as_the_mode_says() {
    let (ours, other) = (Authority::new(), Authority::new());
    let identity = ours.sign("localhost");
    let folder = own_folder("verified");
    let for_the_server = |file: &Path| {
        let copy = folder.join(file.file_name().unwrap());
        std::fs::copy(file, &copy).unwrap();
        std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o600)).unwrap();
        if let Some((uid, gid)) = server_user() {
            std::os::unix::fs::chown(&copy, Some(uid), Some(gid)).unwrap();
        }
        copy.display().to_string()
    };
    let settings = [
        "ssl=on".to_owned(),
        format!("ssl_cert_file={}", for_the_server(&identity.cert_file)),
        format!("ssl_key_file={}", for_the_server(&identity.key_file)),
    ];
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let cluster = tokio::task::block_in_place(|| Cluster::with(&settings));
    let (port, ca, strange) = (cluster.port(), ours.path("ca.pem"), other.path("ca.pem"));
    for mode in ["verify-full", "require", "verify-ca"] {
        assert_eq!(refused(port, "localhost", mode, &ca).await, None, "{mode}");
        let told = refused(port, "localhost", mode, &strange).await.expect(mode);
        assert!(told.contains("invalid peer certificate"), "{mode}: {told}");
    }
    assert_eq!(refused(port, "127.0.0.1", "verify-ca", &ca).await, None);
    let told = refused(port, "127.0.0.1", "verify-full", &ca).await.expect("another name");
    assert!(told.contains("not valid for name"), "{told}");
    let empty = private(&folder, "empty.pem", "");
    let told = refused(port, "localhost", "verify-full", &empty).await.expect("no roots");
    assert!(told.contains("there is no certificate in it (PEM)"), "{told}");
    std::fs::remove_dir_all(&folder).unwrap();
}
