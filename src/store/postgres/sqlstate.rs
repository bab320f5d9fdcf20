//! What an error that is reported means for what was asked: one table over the classes of SQLSTATE (PostgreSQL's
//! documentation, appendix A).
//!
//! A server that reports an error of severity `ERROR` has rolled the transaction back, also one that came at the commit: an
//! error after the commit's record is written is raised to a PANIC by the server. So nothing was done, and only what the
//! error says matters. All else leaves a doubt where something was written, since the commit may have been before it:
//!
//! - `FATAL` and `PANIC` end the connection. A backend that is stopped between its commit and its answer says `FATAL`
//!   (57P01, 57P02), or nothing at all.
//! - Who sends no severity that is not translated (the field `V`) is not a server of a version that is supported (9.6
//!   has it), but a pooler that may have lost one: PgBouncer says 08P01 then, Odyssey 08006.
//! - Some poolers copy the field. None of them names a place in the server's source (the field `F`): without it, an error
//!   that is about the server, and not about the statement, may be a pooler's word for a server that it has lost.
//!
//! A doubt is never wrong, only slow: it is ended by asking again.

use tokio_postgres::error::{DbError, Severity};

/// What an error that was reported means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// Not done, since others were in the way; at once again it may be.
    Again,
    /// Not done: this statement cannot be run at the moment. It says nothing of others.
    Busy,
    /// Not done: the database cannot do it at the moment, and most likely nothing else of the kind.
    Down,
    /// Not done: the server takes no writes, a standby's or by its settings. Another server may.
    ReadOnly,
    /// Not done, and never will be: the database refuses these data.
    Refused,
    /// Not done: the statement does not fit the database. The program's mistake, or somebody has changed schema or rights.
    Mistake,
    /// The connection is lost, or whoever speaks may have lost it: what was written is in doubt.
    Lost,
}

/// Each class, and each code that means something else than its class does. A code goes before its class.
const TABLE: &[(&str, Meaning)] = {
    use Meaning::{Again, Busy, Down, Lost, Mistake, ReadOnly, Refused};
    &[
        // Success, warning, no data: not errors. Somebody's function raises them.
        ("00", Mistake),
        ("01", Mistake),
        ("02", Mistake),
        // Statement not yet complete.
        ("03", Mistake),
        // Connection exception: poolers say so of a server that they have lost, servers of a message that they do not
        // understand.
        ("08", Lost),
        // Triggered action exception, and what is not supported: also a plan that a change of the schema has outdated.
        ("09", Mistake),
        ("0A", Mistake),
        // Invalid transaction initiation, locators, grantors, roles, diagnostics, XQuery; case not found.
        ("0B", Mistake),
        ("0F", Mistake),
        ("0L", Mistake),
        ("0P", Mistake),
        ("0Z", Mistake),
        ("10", Mistake),
        ("20", Mistake),
        // Cardinality violation.
        ("21", Mistake),
        // Data exception: characters that the encoding does not have (22021, 22P05), what is out of range or too long.
        ("22", Refused),
        // Integrity constraint violation.
        ("23", Refused),
        // Invalid cursor state.
        ("24", Mistake),
        // Invalid transaction state. Its time-outs (25P03, 25P04) are FATAL.
        ("25006", ReadOnly),
        ("25", Mistake),
        // Invalid statement name: a pooler that hands prepared statements to another server.
        ("26", Mistake),
        // Triggered data change violation.
        ("27", Refused),
        // Invalid authorization: FATAL while connecting; in a statement, rights that were taken away.
        ("28", Down),
        ("2B", Mistake),
        // Invalid transaction termination; SQL routine exception.
        ("2D", Mistake),
        ("2F", Mistake),
        ("34", Mistake),
        ("38", Mistake),
        ("39", Mistake),
        ("3B", Mistake),
        ("3D", Mistake),
        ("3F", Mistake),
        // Transaction rollback. 40002 is a constraint; of 40003 (statement completion unknown) the name says it.
        ("40002", Refused),
        ("40003", Lost),
        ("40", Again),
        // Syntax error or access rule violation. 42501 is also how the server says that its file system takes no writes.
        ("42501", Down),
        ("42", Mistake),
        // WITH CHECK OPTION violation.
        ("44", Refused),
        // Insufficient resources: disk full, out of memory, too many connections, a limit of the configuration.
        ("53", Down),
        // Program limit exceeded: what is too large for an index or a field.
        ("54", Refused),
        // Object not in prerequisite state: a lock that was not to be had (55P03), something in use.
        ("55", Busy),
        // Operator intervention. 57014: the statement was cancelled, by somebody or by a time-out of the server's; a wait for
        // a standby that is cancelled is a warning, and the commit counts. The others end the connection (57P01 to 57P05),
        // and come at any time, also right after a commit.
        ("57014", Busy),
        ("57P", Lost),
        ("57", Down),
        // System error: files, and input and output.
        ("58", Down),
        // Snapshot too old.
        ("72", Busy),
        // Error in the configuration file; foreign data.
        ("F0", Mistake),
        ("HV", Mistake),
        // PL/pgSQL: somebody's trigger or function refuses what is written.
        ("P0", Refused),
        // Internal error: corrupted data or index; all errors of files that have no code of their own, as a quota.
        ("XX", Down),
    ]
};

/// What this error means for what was asked.
pub(super) fn meaning(error: &DbError) -> Meaning {
    if error.parsed_severity() != Some(Severity::Error) {
        return Meaning::Lost;
    }
    of(error.code().code(), error.file().is_some())
}

/// Of an error of severity `ERROR`. `placed`: it names a place in the server's source.
fn of(code: &str, placed: bool) -> Meaning {
    let row = TABLE.iter().find(|(start, _)| code.starts_with(start));
    // An extension's, or a function's that made up its own: it was raised in the transaction, and ended it.
    let meaning = row.map_or(Meaning::Mistake, |(_, meaning)| *meaning);
    match meaning {
        Meaning::Busy | Meaning::Down | Meaning::Mistake if !placed => Meaning::Lost,
        Meaning::Again
        | Meaning::Busy
        | Meaning::Down
        | Meaning::ReadOnly
        | Meaning::Refused
        | Meaning::Mistake
        | Meaning::Lost => meaning,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Appendix A of PostgreSQL 17: its classes.
    const CLASSES: &[&str] = &[
        "00", "01", "02", "03", "08", "09", "0A", "0B", "0F", "0L", "0P", "0Z", "10", "20", "21",
        "22", "23", "24", "25", "26", "27", "28", "2B", "2D", "2F", "34", "38", "39", "3B", "3D",
        "3F", "40", "42", "44", "53", "54", "55", "57", "58", "72", "F0", "HV", "P0", "XX",
    ];

    #[test]
    fn each_class_has_its_row_and_each_code_stands_before_its_class() {
        for class in CLASSES {
            let rows: Vec<_> = TABLE.iter().filter(|(start, _)| start == class).collect();
            assert_eq!(rows.len(), 1, "{class}");
        }
        for (at, (code, _)) in TABLE.iter().enumerate() {
            assert!(CLASSES.iter().any(|class| code.starts_with(class)), "{code}");
            let shadowed = TABLE.iter().take(at).any(|(before, _)| code.starts_with(before));
            assert!(!shadowed, "{code} is never reached");
        }
    }

    #[test]
    fn what_a_server_reports_is_not_done_and_only_a_lost_connection_is_doubt() {
        use Meaning::{Again, Busy, Down, Lost, Mistake, ReadOnly, Refused};
        for (code, expected) in [
            ("53100", Down),
            ("53200", Down),
            ("53300", Down),
            ("53400", Down),
            ("58030", Down),
            ("XX000", Down),
            ("XX001", Down),
            ("42501", Down),
            ("25006", ReadOnly),
            ("25P02", Mistake),
            ("40001", Again),
            ("40P01", Again),
            ("40003", Lost),
            ("55P03", Busy),
            ("57014", Busy),
            ("57P01", Lost),
            ("57P02", Lost),
            ("57P03", Lost),
            ("08006", Lost),
            ("08P01", Lost),
            ("22021", Refused),
            ("22P05", Refused),
            ("23505", Refused),
            ("54000", Refused),
            ("P0001", Refused),
            ("42P01", Mistake),
            ("0A000", Mistake),
            ("OG001", Mistake),
        ] {
            assert_eq!(of(code, true), expected, "{code}");
        }
    }

    #[test]
    fn what_a_pooler_may_say_of_a_server_that_it_has_lost_is_doubt() {
        for code in ["58000", "XX000", "57014", "53300", "ZZ999"] {
            assert_eq!(of(code, false), Meaning::Lost, "{code}");
        }
        // Nobody but the database looks at data.
        assert_eq!(of("22021", false), Meaning::Refused);
        assert_eq!(of("40001", false), Meaning::Again);
    }
}
