//! Metrics of the process, which has one build, one log and one set of background tasks for all registries.

use std::sync::LazyLock;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use super::labels::{ByLoss, ByTask, Loss};

/// The commit of this build, if the build had this variable.
const REVISION: &str = match option_env!("ONCEGATE_REVISION") {
    Some(revision) if !revision.is_empty() => revision,
    Some(_) | None => "unknown",
};

/// Lost log lines.
static LINES_LOST: LazyLock<Family<ByLoss, Counter>> = LazyLock::new(|| {
    let lost = Family::default();
    // Shown from the start: an alert on a series that is absent never fires.
    for reason in Loss::ALL {
        drop(lost.get_or_create(&ByLoss { reason: *reason }));
    }
    lost
});

/// Panics since the log began.
static PANICS: LazyLock<Counter> = LazyLock::new(Counter::default);

static TASK_ENDS: LazyLock<Family<ByTask, Counter>> = LazyLock::new(Family::default);

/// Log lines that were lost for this reason.
pub(super) fn lines_lost(reason: Loss) -> Counter {
    LINES_LOST.get_or_create_owned(&ByLoss { reason })
}

/// The program panicked.
pub(super) fn panicked() {
    PANICS.inc();
}

/// Shows a background task from its begin on, with 0 ends.
pub fn task_begun(task: &'static str) {
    drop(TASK_ENDS.get_or_create(&ByTask { task }));
}

/// Counts a background task that ended although nothing stopped it.
pub fn task_ended(task: &'static str) {
    TASK_ENDS.get_or_create(&ByTask { task }).inc();
}

/// Adds these metrics to a registry.
pub(super) fn register(registry: &mut Registry) {
    let build = [("version", env!("CARGO_PKG_VERSION")), ("revision", REVISION)];
    registry.register("build", "Which program this is", Info::new(build.to_vec()));
    registry.register(
        "log_lines_lost",
        "Log lines that could not be written, by the reason",
        LINES_LOST.clone(),
    );
    registry.register(
        "panics",
        "Panics of this process; each is a mistake of the program",
        PANICS.clone(),
    );
    registry.register(
        "task_ends",
        "Background tasks that ended though they were not told to, by the task",
        TASK_ENDS.clone(),
    );
}
