//! Makes the events of a completion by hand, for the commands and the admin listeners of `serve` and `relay`.

use std::time::Duration;

use crate::admin::resolve::Announced;
use crate::clock;
use crate::record::Answer;
use crate::record::event::Origin;
use crate::route::Routes;
use crate::store::RecordRow;

/// Retention of a completion by hand if the configuration no longer has the record's route.
const RETENTION: Duration = Duration::from_secs(24 * 3600);

/// Makes the events of an answer from the templates of the record's route, with the route's retention. If the configuration no
/// longer has the operation, there are no events.
pub(super) fn announced(routes: &Routes, row: &RecordRow, answer: &Answer) -> Announced {
    let Some(route) = routes.by_operation(row.scope.operation.as_str()) else {
        return Announced { events: Vec::new(), failed: 0, retention: RETENTION };
    };
    let rendered = route.events.render(&Origin {
        record: row.id,
        scope: &row.scope,
        attempt: row.attempt.next(),
        at: clock::time_of_day(),
        context: row.context.as_deref(),
        answer,
    });
    let (events, failed) = (rendered.events, rendered.failed);
    Announced { events, failed, retention: route.policy.retention }
}
