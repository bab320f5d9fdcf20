//! What all starts share: opening the store, and the reasons why a start fails.

use std::sync::Arc;
use std::time::Duration;

use crate::config::{self, Listen, NoDigestKey, StoreKind};
use crate::gateway::spill::{DrainError, Unwritable};
use crate::store::postgres::Postgres;
use crate::store::sqlite::Sqlite;
use crate::store::{self, OpenError, Store};

/// Why a process did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The store.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The store did not take the first statements.
    #[error("the store is not usable")]
    Store(#[from] store::Error),
    /// The spill's folder.
    #[error(transparent)]
    Spill(#[from] Unwritable),
    /// What the spill holds of dead processes.
    #[error(transparent)]
    Drain(#[from] DrainError),
    /// An address cannot be listened on.
    #[error("cannot listen on {} ({})", listen.address, listen.setting)]
    Listen {
        /// Which.
        listen: Listen,
        /// Why.
        #[source]
        cause: std::io::Error,
    },
    /// The store did not come in time.
    #[error(
        "the store could not be opened within store.wait_at_start ({})",
        humantime::format_duration(*limit)
    )]
    Waited {
        /// How long the start waited.
        limit: Duration,
        /// Why the last try failed.
        #[source]
        cause: Box<Self>,
    },
    /// The key of the digests.
    #[error(transparent)]
    DigestKey(#[from] NoDigestKey),
    /// A part of the configuration cannot be used.
    #[error("{0}")]
    Config(String),
}

impl StartError {
    /// Whether the same start may succeed later although nobody changes anything.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Open(error) => error.may_pass(),
            Self::Store(error) => error.may_pass(),
            Self::Drain(error) => error.may_pass(),
            Self::Spill(_)
            | Self::Listen { .. }
            | Self::Waited { .. }
            | Self::DigestKey(_)
            | Self::Config(_) => false,
        }
    }
}

/// Opens the store for a command, beside a running `serve`.
///
/// # Errors
/// See [`OpenError`]; one of them is a schema of another version.
pub async fn open(settings: &config::Store, migrate: bool) -> Result<Arc<dyn Store>, OpenError> {
    let store: Arc<dyn Store> = match &settings.kind {
        StoreKind::Sqlite(location) => {
            let store = Sqlite::open(location).await?;
            store.migrate(migrate).await?;
            Arc::new(store)
        }
        StoreKind::Postgres(postgres) => {
            let store = Postgres::open(postgres.clone()).await?;
            store.migrate(migrate).await?;
            Arc::new(store)
        }
    };
    Ok(sealed(store, settings))
}

/// The store as the program uses it: it seals what it keeps if there are keys.
pub(super) fn sealed(store: Arc<dyn Store>, settings: &config::Store) -> Arc<dyn Store> {
    store::sealed::sealed(store::with_fault_points(store), Arc::clone(&settings.keys))
}
