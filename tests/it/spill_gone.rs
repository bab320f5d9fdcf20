//! The spill's folder or file is removed, renamed or replaced while the process runs: what was told to be kept is found by the
//! next process all the same, and what cannot be kept is not told to be.

use std::path::PathBuf;

use http::StatusCode;

use crate::spill::{assert_kept, drained, files, locked, said};
use crate::support::client::Answer;
use crate::support::fault::Fault;
use crate::support::fleet::{TWO_EVENTS, metric, order, sending};
use crate::support::orders::Orders;
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Which, on_both_stores};

/// What the log says once all that the file held is in a new one.
const MOVED: &str = "all that it held is in a new one";
/// What it says where there can be no new one.
const NOT_MOVED: &str = "and no new one can be made";

/// How a test's database goes away.
enum Database {
    Postgres(Fault),
    Sqlite(Option<rusqlite::Connection>),
}

/// A gateway whose database can go away, and whose spill stands in a folder of a folder.
struct World {
    orders: Orders,
    place: Place,
    database: Database,
    gateway: Gateway,
}

impl World {
    async fn start(which: Which) -> Self {
        let (orders, place) = (Orders::start().await, Place::new(which).await);
        let spill = place.folder.path().join("volume/spill");
        let store =
            format!("completion_timeout = \"200ms\"\nspill = {{ dir = \"{}\" }}", spill.display());
        let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", &store, "", TWO_EVENTS);
        let toml = toml.replace("shutdown_grace = \"10s\"", "shutdown_grace = \"300ms\"");
        let (database, url) = match which {
            Which::Postgres => {
                let port = Cluster::shared().port();
                let (fault, url) = Fault::before_postgres(&place.url, port).await;
                (Database::Postgres(fault), url)
            }
            Which::Sqlite => (Database::Sqlite(None), place.url.clone()),
        };
        let config = process::config(place.folder.path(), &toml.replace(&place.url, &url));
        let gateway = tokio::task::block_in_place(|| Gateway::start(&config));
        Self { orders, place, database, gateway }
    }

    fn volume(&self) -> PathBuf {
        self.place.folder.path().join("volume")
    }

    fn folder(&self) -> PathBuf {
        self.volume().join("spill")
    }

    /// The one file that the folder holds.
    fn file(&self) -> PathBuf {
        let mut files = files(&self.folder(), "spill");
        assert_eq!(files.len(), 1, "{files:?}");
        files.remove(0)
    }

    fn away(&mut self) {
        match &mut self.database {
            Database::Postgres(fault) => {
                fault.refuse();
                fault.cut();
            }
            Database::Sqlite(lock) => *lock = Some(locked(&self.place)),
        }
    }

    fn back(&mut self) {
        match &mut self.database {
            Database::Postgres(fault) => fault.pass(),
            Database::Sqlite(lock) => drop(lock.take()),
        }
    }

    /// Has a key executed while the database is away.
    async fn outcome_without_a_database(&mut self, key: &str) -> Answer {
        let asked = self.orders.runs();
        self.orders.hold();
        let answer = sending(order(key), self.gateway.addr);
        self.orders.asked(asked + 1).await;
        self.away();
        self.orders.go();
        answer.await.unwrap()
    }

    /// Has two keys executed while the database is away, and `harm` done between their outcomes.
    async fn outcomes_around(&mut self, harm: impl FnOnce(&Self)) -> [Answer; 2] {
        self.orders.hold();
        let before = sending(order("a"), self.gateway.addr);
        self.orders.asked(1).await;
        let after = sending(order("b"), self.gateway.addr);
        self.orders.asked(2).await;
        self.away();
        self.orders.hold_only(2);
        let before = before.await.unwrap();
        assert_kept(&before);
        harm(self);
        self.orders.go();
        [before, after.await.unwrap()]
    }

    /// A new process on the same files, with a database.
    fn restart(&mut self) {
        self.back();
        self.gateway = tokio::task::block_in_place(|| self.gateway.restart());
    }

    fn killed_and_started(&mut self) {
        self.gateway.kill9();
        self.restart();
    }

    /// What was told is what is replayed, nothing was executed twice, and each outcome has its events once.
    async fn replays(&self, told: &[(&str, &Answer)]) {
        for (key, first) in told {
            let status = self.place.status_of(key).await;
            assert_eq!(status.as_deref(), Some("completed"), "{key}: as soon as it is ready");
            let replay = order(key).to(self.gateway.addr).await;
            assert!(replay.replayed(), "{key}: {replay:?}");
            assert_eq!((replay.record(), &replay.body), (first.record(), &first.body));
            assert_eq!(self.orders.runs_of(key), 1, "{key}");
        }
        assert_eq!(self.place.events().await, 2 * i64::try_from(told.len()).unwrap());
    }
}

on_both_stores! {
    what_was_kept_before_and_after_the_folder_is_removed_outlives_the_process,
    a_folder_that_is_removed_after_the_last_sync_is_missed_as_well,
    a_file_that_is_renamed_goes_on_in_a_new_one,
    a_file_in_whose_place_another_stands_goes_on_in_a_new_one,
    a_folder_that_is_removed_is_missed_at_a_clean_end,
    where_no_folder_can_be_made_nothing_is_told_to_be_kept_and_nothing_new_is_reserved,
    what_was_kept_before_is_kept_again_once_a_folder_can_be_made,
}

async fn what_was_kept_before_and_after_the_folder_is_removed_outlives_the_process(which: Which) {
    let mut world = World::start(which).await;
    let [before, after] =
        world.outcomes_around(|world| std::fs::remove_dir_all(world.folder()).unwrap()).await;
    assert_kept(&after);
    assert_eq!(metric(world.gateway.admin, "oncegate_spill_entries").await, 2);
    assert!(world.file().starts_with(world.folder()), "made before the caller was told");
    said(&world.gateway, MOVED).await;
    world.killed_and_started();
    world.replays(&[("a", &before), ("b", &after)]).await;
}

async fn a_folder_that_is_removed_after_the_last_sync_is_missed_as_well(which: Which) {
    let mut world = World::start(which).await;
    let first = world.outcome_without_a_database("k").await;
    assert_kept(&first);
    std::fs::remove_dir_all(world.volume()).unwrap();
    said(&world.gateway, MOVED).await;
    world.killed_and_started();
    world.replays(&[("k", &first)]).await;
}

async fn a_file_that_is_renamed_goes_on_in_a_new_one(which: Which) {
    let mut world = World::start(which).await;
    let renamed = world.folder().join("old.spill");
    let [before, after] =
        world.outcomes_around(|world| std::fs::rename(world.file(), &renamed).unwrap()).await;
    assert_kept(&after);
    assert_eq!(files(&world.folder(), "spill").len(), 2);
    world.killed_and_started();
    world.replays(&[("a", &before), ("b", &after)]).await;
    // Both stand in both files: the second was synced into the old one before that was missed.
    let admin = world.gateway.admin;
    assert_eq!((drained(admin, "completed").await, drained(admin, "already").await), (2, 2));
}

async fn a_file_in_whose_place_another_stands_goes_on_in_a_new_one(which: Which) {
    let mut world = World::start(which).await;
    let (path, theirs) = (world.file(), "somebody else's".repeat(100));
    let [before, after] = world
        .outcomes_around(|world| {
            let other = world.volume().join("other");
            std::fs::write(&other, &theirs).unwrap();
            std::fs::rename(&other, world.file()).unwrap();
        })
        .await;
    assert_kept(&after);
    world.killed_and_started();
    world.replays(&[("a", &before), ("b", &after)]).await;
    assert_eq!(std::fs::read_to_string(&path).unwrap(), theirs, "it is left alone");
    said(&world.gateway, "its header is damaged, or it is no spill").await;
}

async fn a_folder_that_is_removed_is_missed_at_a_clean_end(which: Which) {
    let mut world = World::start(which).await;
    let first = world.outcome_without_a_database("k").await;
    assert_kept(&first);
    std::fs::remove_dir_all(world.folder()).unwrap();
    world.gateway.terminate();
    assert!(tokio::task::block_in_place(|| world.gateway.exited()).success());
    assert!(world.gateway.log().contains(MOVED), "{}", world.gateway.log());
    world.restart();
    world.replays(&[("k", &first)]).await;
}

/// Removes the folder, and lets nobody make it anew.
fn block(world: &World) {
    std::fs::remove_dir_all(world.volume()).unwrap();
    std::fs::write(world.volume(), "").unwrap();
}

fn unblock(world: &World) {
    std::fs::remove_file(world.volume()).unwrap();
}

async fn where_no_folder_can_be_made_nothing_is_told_to_be_kept_and_nothing_new_is_reserved(
    which: Which,
) {
    let mut world = World::start(which).await;
    let [before, after] = world.outcomes_around(block).await;
    assert_eq!(after.status, StatusCode::CREATED, "the API's answer");
    assert_eq!(after.header("oncegate-stored"), Some("false"));
    said(&world.gateway, NOT_MOVED).await;

    world.back();
    for key in ["a", "b"] {
        let done = async || world.place.status_of(key).await.as_deref() == Some("completed");
        eventually("it is written from memory", done).await;
    }
    world.replays(&[("a", &before), ("b", &after)]).await;
    let refused = order("c").to(world.gateway.addr).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE, "{refused:?}");
    assert_eq!(refused.problem(), "store-unavailable");
    assert_eq!(world.orders.runs_of("c"), 0);
    assert!(metric(world.gateway.admin, "oncegate_spill_refused_total").await >= 1);

    unblock(&world);
    eventually("it reserves again", async || {
        order("c").to(world.gateway.addr).await.status == StatusCode::CREATED
    })
    .await;
    let first = order("c").to(world.gateway.addr).await;
    let again = world.outcome_without_a_database("d").await;
    assert_kept(&again);
    world.killed_and_started();
    world.replays(&[("a", &before), ("b", &after), ("c", &first), ("d", &again)]).await;
}

async fn what_was_kept_before_is_kept_again_once_a_folder_can_be_made(which: Which) {
    let mut world = World::start(which).await;
    let [before, after] = world.outcomes_around(block).await;
    assert_eq!(after.header("oncegate-stored"), Some("false"));
    unblock(&world);
    said(&world.gateway, MOVED).await;
    world.killed_and_started();
    world.replays(&[("a", &before)]).await;
    assert_ne!(world.place.status_of("b").await.as_deref(), Some("completed"), "as it was told");
    let retry = order("b").to(world.gateway.addr).await;
    assert_ne!(retry.status, StatusCode::CREATED, "{retry:?}");
    assert_eq!(world.orders.runs_of("b"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_that_is_made_anew_is_shared_as_before_and_no_file_of_the_living_is_taken() {
    let mut world = World::start(Which::Postgres).await;
    let [before, after] =
        world.outcomes_around(|world| std::fs::remove_dir_all(world.folder()).unwrap()).await;
    let file = world.file();
    // With a database of its own way, so that it drains what it takes for a dead process's.
    let toml = std::fs::read_to_string(&world.gateway.config).unwrap();
    let Database::Postgres(fault) = &world.database else { unreachable!("it is Postgres") };
    let port = format!("127.0.0.1:{}/", Cluster::shared().port());
    let toml = toml.replace(&format!("{}/", fault.addr), &port);
    let config = process::config(world.place.folder.path(), &toml);
    let neighbour = tokio::task::block_in_place(|| Gateway::start(&config));
    assert_eq!(drained(neighbour.admin, "completed").await, 0);
    assert_eq!(files(&world.folder(), "spill").len(), 2, "each has its own");
    assert!(file.exists());
    drop(neighbour);
    world.killed_and_started();
    world.replays(&[("a", &before), ("b", &after)]).await;
}
