//! What `check` says of a store: what would keep `serve` from working with it is named, and where it did not look it says so.

use std::path::Path;

use crate::support::postgres::Cluster;
use crate::support::process;
use crate::support::rig::{self, Place, Which};

/// Has a store of this URL checked: exit status, output, errors.
fn check_url(place: &Place, url: &str, store: &str, more: &[&str]) -> (i32, String, String) {
    let toml = rig::config_at(place, "http://127.0.0.1:9", "127.0.0.1:0", store, "", "");
    let config = process::config(place.folder.path(), &toml.replace(&place.url, url));
    process::run(&[&["check", "--config", config.to_str().unwrap()], more].concat())
}

/// Is refused, with these words among its last.
fn refused(place: &Place, url: &str, store: &str, told: &[&str]) {
    let (code, out, errors) = check_url(place, url, store, &[]);
    assert_eq!(code, 1, "{out}{errors}");
    assert!(!out.contains("ok: "), "{out}");
    for told in told {
        assert!(errors.contains(told), "{told}: {out}{errors}");
    }
    let (code, out, _) = check_url(place, url, store, &["--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &json["ok"], &json["store"]["looked"]), (1, &false.into(), &true.into()));
    assert!(json["store"]["unusable"][0].as_str().unwrap().contains(told[0]), "{json}");
}

fn fine(place: &Place, url: &str, store: &str, told: &str) {
    let (code, out, errors) = check_url(place, url, store, &[]);
    assert!(code == 0 && out.contains(told), "{told}: {out}{errors}");
    assert!(out.lines().last().unwrap().ends_with("; the store was looked at"), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn check_names_what_keeps_serve_from_working_with_a_postgres() {
    let cluster = Cluster::shared();
    let place = Place::new(Which::Postgres).await;
    let ask = |sql: &str| tokio::task::block_in_place(|| cluster.execute("postgres", sql));
    ask(
        "CREATE DATABASE latin_checked ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'",
    );
    refused(&place, &cluster.url("latin_checked"), "", &["the encoding LATIN1", "ENCODING 'UTF8'"]);
    let as_role = |role: &str| place.url.replace("//postgres@", &format!("//{role}@"));
    assert_ne!(as_role("nobody"), place.url);
    refused(&place, &as_role("nobody"), "", &["role \"nobody\" does not exist"]);
    refused(&place, &format!("{}x", place.url), "", &["does not exist"]);

    // No schema yet.
    fine(&place, &place.url, "", "note: the store is empty: `serve` makes its schema");
    let no_schema = ["the store has no schema yet", "run `oncegate migrate`"];
    refused(&place, &place.url, "migrate = false", &no_schema);
    place.rows("CREATE ROLE checked LOGIN").await;
    place.rows("REVOKE CREATE ON SCHEMA public FROM PUBLIC").await;
    refused(&place, &as_role("checked"), "", &["may not CREATE in the schema \"public\""]);

    let migrate =
        process::config(place.folder.path(), &rig::config(&place, "http://127.0.0.1:9", ""));
    let (code, _, errors) = process::run(&["migrate", "--config", migrate.to_str().unwrap()]);
    assert_eq!(code, 0, "{errors}");
    fine(&place, &place.url, "", "ok: 1 route");
    refused(&place, &as_role("checked"), "", &["cannot be read", "permission denied"]);
    place.rows("GRANT ALL ON ALL TABLES IN SCHEMA public TO checked").await;
    fine(&place, &as_role("checked"), "", "ok: 1 route");
    place.rows("REVOKE INSERT ON idempotency_records FROM checked").await;
    place.rows("REVOKE DELETE, UPDATE ON outbox_queue FROM checked").await;
    let lacking = [
        "the role \"checked\" may not INSERT on the table idempotency_records: GRANT INSERT ON idempotency_records TO",
        "may not UPDATE, DELETE on the table outbox_queue",
    ];
    refused(&place, &as_role("checked"), "", &lacking);
    place.rows("ALTER TABLE outbox_done RENAME TO elsewhere").await;
    refused(&place, &place.url, "", &["the table outbox_done is not there"]);
    place.rows("INSERT INTO oncegate_migrations (version, name) VALUES (999, 'later')").await;
    refused(&place, &place.url, "", &["version 999", "use a newer oncegate"]);
    place.rows("DROP OWNED BY checked").await;
    place.rows("DROP ROLE checked").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn check_and_serve_name_the_folder_of_a_file_that_is_not_there() {
    let place = Place::new(Which::Sqlite).await;
    let folder = place.folder.path().join("gone");
    let url = |file: &Path| format!("sqlite:{}", file.display());
    let lost = url(&folder.join("oncegate.db"));
    let told = format!("there is no folder {}", folder.display());
    refused(&place, &lost, "", &[&told]);
    assert!(!folder.exists(), "nothing is made");
    let toml = rig::config(&place, "http://127.0.0.1:9", "").replace(&place.url, &lost);
    let config = process::config(place.folder.path(), &toml);
    let (code, _, errors) = process::run(&["serve", "--config", config.to_str().unwrap()]);
    assert!(code == 1 && errors.contains(&told), "{errors}");

    let (code, out, _) = check_url(&place, &place.url, "", &[]);
    assert!(code == 0 && out.contains("yet: `serve` makes it"), "{out}");
    refused(&place, &format!("{}?mode=rw", place.url), "", &["mode=rw"]);
    std::fs::write(
        place.folder.path().join("oncegate.db"),
        "this is no database, whatever its name says",
    )
    .unwrap();
    refused(&place, &place.url, "", &["not a database"]);
}
