//! A whole installation: API, store, gateway as a process, and what looks into the store from outside.

use std::path::PathBuf;

use tempfile::TempDir;
use tokio_postgres::SimpleQueryMessage;

use super::fault::Fault;
use super::orders::Orders;
use super::postgres::Cluster;
use super::process::{self, Gateway};

/// On which store a test runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Sqlite,
    Postgres,
}

/// Makes a test of each function, on each store.
macro_rules! on_both_stores {
    ($($name:ident,)*) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::$name(crate::support::rig::Which::Sqlite).await;
            })*
        }
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::$name(crate::support::rig::Which::Postgres).await;
            })*
        }
    };
}
pub(crate) use on_both_stores;

/// A database of its own.
pub struct Place {
    pub folder: TempDir,
    pub url: String,
    file: PathBuf,
    which: Which,
}

impl Place {
    pub async fn new(which: Which) -> Self {
        let folder = TempDir::new().expect("a folder");
        let file = folder.path().join("oncegate.db");
        let url = match which {
            Which::Sqlite => format!("sqlite:{}", file.display()),
            Which::Postgres => Cluster::shared().database(),
        };
        Self { folder, url, file, which }
    }

    /// On another database server than the shared one.
    pub fn at(url: String) -> Self {
        let folder = TempDir::new().expect("a folder");
        let file = folder.path().join("none");
        Self { folder, url, file, which: Which::Postgres }
    }

    /// All rows of a query, each cell as text.
    pub async fn rows(&self, sql: &str) -> Vec<Vec<Option<String>>> {
        match self.which {
            Which::Sqlite => self.sqlite(sql),
            Which::Postgres => self.postgres(sql).await,
        }
    }

    fn sqlite(&self, sql: &str) -> Vec<Vec<Option<String>>> {
        let db = rusqlite::Connection::open(&self.file).expect("the database");
        db.busy_timeout(process::PATIENCE).expect("patience");
        let mut statement = db.prepare(sql).unwrap_or_else(|error| panic!("{sql}: {error}"));
        let columns = statement.column_count();
        let cell = |value: rusqlite::types::Value| match value {
            rusqlite::types::Value::Null => None,
            rusqlite::types::Value::Integer(number) => Some(number.to_string()),
            rusqlite::types::Value::Real(number) => Some(number.to_string()),
            rusqlite::types::Value::Text(text) => Some(text),
            rusqlite::types::Value::Blob(bytes) => {
                Some(String::from_utf8_lossy(&bytes).into_owned())
            }
        };
        let rows = statement
            .query_map([], |row| (0..columns).map(|n| row.get(n).map(cell)).collect())
            .unwrap_or_else(|error| panic!("{sql}: {error}"));
        rows.collect::<Result<_, _>>().unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    async fn postgres(&self, sql: &str) -> Vec<Vec<Option<String>>> {
        let (client, connection) =
            tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await.expect("the database");
        let driver = tokio::spawn(connection);
        let messages =
            client.simple_query(sql).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
        driver.abort();
        let row = |message| match message {
            SimpleQueryMessage::Row(row) => {
                Some((0..row.len()).map(|n| row.get(n).map(str::to_owned)).collect())
            }
            SimpleQueryMessage::CommandComplete(_) | SimpleQueryMessage::RowDescription(_) | _ => {
                None
            }
        };
        messages.into_iter().filter_map(row).collect()
    }

    /// The first cell of a query, as a number.
    pub async fn count(&self, sql: &str) -> i64 {
        let rows = self.rows(sql).await;
        let cell = rows.first().and_then(|row| row.first()).cloned().flatten();
        cell.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{sql}: {rows:?}"))
    }

    /// How many records there are.
    pub async fn records(&self) -> i64 {
        self.count("select count(*) from idempotency_records").await
    }

    /// How many rows the outbox shows.
    pub async fn events(&self) -> i64 {
        self.count("select count(*) from outbox_events").await
    }

    /// The status of the record under a key.
    pub async fn status_of(&self, key: &str) -> Option<String> {
        let rows =
            self.rows(&format!("select status from idempotency_records where key = '{key}'")).await;
        rows.into_iter().next()?.into_iter().next()?
    }
}

/// As [`config_at`], on any port and with nothing but defaults.
pub fn config(place: &Place, upstream: &str, more: &str) -> String {
    config_at(place, upstream, "127.0.0.1:0", "", "", more)
}

/// A configuration for tests: one route, orders, tenants by header; with lines for the sections `[store]` and `[policy]`.
pub fn config_at(
    place: &Place,
    upstream: &str,
    listen: &str,
    store: &str,
    policy: &str,
    more: &str,
) -> String {
    let url = &place.url;
    format!(
        r#"
[server]
listen = "{listen}"
shutdown_grace = "10s"
[admin]
listen = "127.0.0.1:0"
[upstream]
url = "{upstream}"
[store]
url = "{url}"
{store}
[policy]
tenant = {{ header = "X-Tenant-Id" }}
{policy}
[[route]]
method = "POST"
path = "/orders"
operation = "orders.create"
{more}
"#
    )
}

/// A database and a gateway before an API of the test's own at `upstream`; lines for `[store]` and `[policy]`.
pub async fn gateway(which: Which, upstream: &str, store: &str, policy: &str) -> (Place, Gateway) {
    let place = Place::new(which).await;
    let toml = config_at(&place, upstream, "127.0.0.1:0", store, policy, "");
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    (place, gateway)
}

/// API, database and gateway.
pub struct Rig {
    pub orders: Orders,
    pub place: Place,
    pub gateway: Gateway,
}

impl Rig {
    /// With what `more` adds behind the route `orders.create`.
    pub async fn start(which: Which, more: &str) -> Self {
        Self::with(which, "", "", more).await
    }

    /// With lines for `[store]` and `[policy]` too.
    pub async fn with(which: Which, store: &str, policy: &str, more: &str) -> Self {
        let (orders, place) = (Orders::start().await, Place::new(which).await);
        let toml = config_at(&place, &orders.url(), "127.0.0.1:0", store, policy, more);
        let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
        Self { orders, place, gateway }
    }
}

/// A gateway whose Postgres is behind a proxy; the rig's place looks past it. Lines for `[store]` and `[policy]`.
pub async fn behind_a_fault(store: &str, policy: &str) -> (Fault, Rig) {
    let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
    let (fault, url) = Fault::before_postgres(&place.url, Cluster::shared().port()).await;
    let toml = config_at(&place, &orders.url(), "127.0.0.1:0", store, policy, "");
    let toml = toml.replace(&place.url, &url);
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    (fault, Rig { orders, place, gateway })
}
