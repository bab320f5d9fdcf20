//! What a store says where it did not do what it was asked, by what may be concluded.

/// Why the store did not do it, by what the caller may conclude.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The database cannot be reached, or did not take the statement. Nothing was changed.
    #[error("the database is not available")]
    Unavailable(#[source] Cause),
    /// The statement was sent, and its end is not known: it may have been committed, or may still be.
    #[error("the database did not say whether it committed")]
    InDoubt(#[source] Cause),
    /// The database refused what was written (a value it cannot hold, say). Nothing was changed; again is no use.
    #[error("the database refused the data")]
    Refused(#[source] Cause),
    /// What is in the database cannot be read: it is not what this program writes, or its key is missing here. Nothing
    /// was changed; again is no use.
    #[error("what is in the database cannot be read")]
    Unreadable(#[source] Cause),
    /// The caller's deadline passed before the statement was begun. Nothing was changed.
    #[error("the database did not get to it in time")]
    Late,
}

impl Error {
    /// Whether the same may succeed another time, with nobody doing anything about it.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Unavailable(_) | Self::InDoubt(_) | Self::Late => true,
            Self::Refused(_) | Self::Unreadable(_) => false,
        }
    }
}

/// Why a store could not be opened or migrated: what was wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The database cannot be opened, or refuses this program: no time mends that.
    #[error("cannot open the store at {place}")]
    Connect {
        /// Where, without secrets.
        place: String,
        /// Why.
        #[source]
        cause: Cause,
    },
    /// The database cannot be reached, or does not serve now.
    #[error("cannot open the store at {place}")]
    Away {
        /// Where, without secrets.
        place: String,
        /// Why.
        #[source]
        cause: Cause,
    },
    /// A migration failed, and will again; the schema is as it was before it.
    #[error("migration {version} of the store failed")]
    Migration {
        /// Which.
        version: u32,
        /// Why.
        #[source]
        cause: Cause,
    },
    /// The schema's version cannot be read, and will not be.
    #[error("the version of the store's schema cannot be read")]
    Unread {
        /// Why.
        #[source]
        cause: Cause,
    },
    /// The database cannot hold every text that a request may have.
    #[error(
        "the database at {place} has the encoding {found}, in which many texts cannot be stored: make another one with \
         `CREATE DATABASE oncegate ENCODING 'UTF8' TEMPLATE template0`, and name it in store.url; what this one holds can be \
         moved by pg_dump and psql"
    )]
    Encoding {
        /// Where, without secrets.
        place: String,
        /// Its encoding.
        found: String,
    },
    /// A migration did not go through this time; the schema is as it was before it, unless the commit's answer was lost.
    #[error("migration {version} of the store did not go through")]
    Interrupted {
        /// Which.
        version: u32,
        /// Why.
        #[source]
        cause: Cause,
    },
    /// The schema is newer than this program.
    #[error(
        "the store's schema is version {found}, this program knows versions up to {known}: use a newer oncegate"
    )]
    NewerSchema {
        /// In the database.
        found: u32,
        /// In this program.
        known: u32,
    },
    /// The schema is older than this program and may not be migrated here.
    #[error(
        "{}, this program needs version {known}: run `oncegate migrate` (`serve` does so at its start, unless store.migrate = false)",
        schema(*found)
    )]
    OlderSchema {
        /// In the database; 0: none.
        found: u32,
        /// In this program.
        known: u32,
    },
    /// Another `serve` works on the same SQLite file.
    #[error(
        "{place} is in use by another `oncegate serve`: stop it, or give this one a file of its own"
    )]
    Locked {
        /// The database file.
        place: String,
    },
}

impl OpenError {
    /// Whether the same may succeed another time, with nobody doing anything about it.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Away { .. } | Self::Interrupted { .. } => true,
            Self::Connect { .. }
            | Self::Migration { .. }
            | Self::Unread { .. }
            | Self::Encoding { .. }
            | Self::NewerSchema { .. }
            | Self::OlderSchema { .. }
            | Self::Locked { .. } => false,
        }
    }
}

/// Which schema there is, in words.
fn schema(version: u32) -> String {
    match version {
        0 => "the store has no schema yet".to_owned(),
        version => format!("the store's schema is version {version}"),
    }
}

/// The error beneath, for the log only: it is never shown to callers.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;
