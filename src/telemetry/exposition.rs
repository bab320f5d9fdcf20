//! In which of its two text formats the page of metrics is sent: what the scraper says in `Accept` decides (RFC 9110, 12.5.1).

use http::header::ACCEPT;
use http::{HeaderMap, HeaderValue};
use prometheus_client::encoding::prometheus_text;

/// A text format of the page of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposition {
    /// OpenMetrics 1.0, for whoever asks for it by its name.
    OpenMetrics,
    /// The text format of Prometheus, version 0.0.4: what everybody reads.
    Prometheus,
}

/// What a media range names, and how much it is wanted.
struct Range<'a> {
    kind: &'a str,
    version: Option<&'a str>,
    weight: f32,
}

impl<'a> Range<'a> {
    /// A weight that is no number between 0 and 1 does not count as a yes.
    fn of(member: &'a str) -> Self {
        let mut parts = member.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default();
        let (mut version, mut weight) = (None, 1.0);
        for (name, value) in parts.filter_map(|part| part.split_once('=')) {
            let value = value.trim().trim_matches('"');
            if name.trim_end().eq_ignore_ascii_case("version") {
                version = Some(value);
            } else if name.trim_end().eq_ignore_ascii_case("q") {
                weight = value.parse().ok().filter(|q| (0.0..=1.0).contains(q)).unwrap_or(0.0);
            }
        }
        Self { kind, version, weight }
    }

    /// How closely it names one of these kinds, in this version: the later the kind, the closer. Parameters beside the version
    /// (`charset`, `escaping`) choose between forms that are one for us: all names are ASCII.
    fn closeness(&self, kinds: &[&str], version: &str) -> Option<usize> {
        let kind = kinds.iter().position(|kind| self.kind.eq_ignore_ascii_case(kind))?;
        match self.version {
            Some(asked) if asked == version => Some(kinds.len()),
            Some(_) => None,
            None => Some(kind),
        }
    }
}

/// How much a format is wanted: as the range says that names it most closely; 0: not at all.
fn weight(ranges: &[Range<'_>], kinds: &[&str], version: &str) -> f32 {
    let named = ranges.iter().filter_map(|range| Some((range.closeness(kinds, version)?, range)));
    named.max_by_key(|(closeness, _)| *closeness).map_or(0.0, |(_, range)| range.weight)
}

impl Exposition {
    /// As `Accept` asks. OpenMetrics only where it is named, and wanted as much as the other; who takes neither gets the
    /// format that everybody reads, as every other exporter does.
    #[must_use]
    pub fn accepted(headers: &HeaderMap) -> Self {
        let lines = headers.get_all(ACCEPT).iter().map(HeaderValue::to_str);
        let lines: Vec<&str> = lines.filter_map(Result::ok).collect();
        let ranges: Vec<Range<'_>> =
            lines.iter().flat_map(|line| line.split(',')).map(Range::of).collect();
        let open_metrics = weight(&ranges, &["application/openmetrics-text"], "1.0.0");
        let prometheus = weight(&ranges, &["*/*", "text/*", "text/plain"], "0.0.4");
        if open_metrics > 0.0 && open_metrics >= prometheus {
            Self::OpenMetrics
        } else {
            Self::Prometheus
        }
    }

    /// What the page says that it is.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => prometheus_text::CONTENT_TYPE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_is_the_one_that_the_scraper_wants_more() {
        use Exposition::{OpenMetrics, Prometheus};
        let cases = [
            // Prometheus 3, 2.40 and 2.5, and one whose `scrape_protocols` name text first.
            (
                "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                 application/openmetrics-text;version=0.0.1;q=0.5,\
                 text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
                OpenMetrics,
            ),
            (
                "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                 text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
                OpenMetrics,
            ),
            (
                "application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
                Prometheus,
            ),
            (
                "text/plain;version=0.0.4;q=0.5,application/openmetrics-text;version=1.0.0;q=0.4,*/*;q=0.3",
                Prometheus,
            ),
            // One that takes protocol buffers, which we do not write.
            (
                "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.5,\
                 application/openmetrics-text;version=1.0.0;q=0.4,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
                OpenMetrics,
            ),
            // Tools and browsers.
            ("", Prometheus),
            ("*/*", Prometheus),
            ("text/html,application/xhtml+xml,*/*;q=0.8", Prometheus),
            ("application/json", Prometheus),
            ("application/openmetrics-text", OpenMetrics),
            ("Application/OpenMetrics-Text; Version=\"1.0.0\"; charset=utf-8", OpenMetrics),
            ("application/openmetrics-text, text/plain", OpenMetrics),
            ("application/openmetrics-text, */*", OpenMetrics),
            ("application/openmetrics-text;q=0.5, text/plain;q=0.6", Prometheus),
            ("application/openmetrics-text;q=0.5, */*;q=0.6", Prometheus),
            // The closer range counts, wherever it stands.
            ("application/openmetrics-text;q=0.5, text/plain;q=0.1, text/*, */*", OpenMetrics),
            ("text/plain;version=0.0.4;q=0, application/openmetrics-text;q=0.1, */*", OpenMetrics),
            (
                "application/openmetrics-text;version=1.0.0;q=0, application/openmetrics-text",
                Prometheus,
            ),
            ("application/openmetrics-text;version=2.0.0, text/plain;q=0.1", Prometheus),
            ("application/openmetrics-text;q=0", Prometheus),
            ("application/openmetrics-text;q=x, text/plain;q=0.1", Prometheus),
            ("application/openmetrics-text;q=7, text/plain;q=0.1", Prometheus),
            (";;q==,,=", Prometheus),
        ];
        for (accept, wanted) in cases {
            let mut headers = HeaderMap::new();
            headers.insert(ACCEPT, HeaderValue::from_static(accept));
            assert_eq!(Exposition::accepted(&headers), wanted, "{accept}");
        }
        assert_eq!(Exposition::accepted(&HeaderMap::new()), Prometheus);
    }

    #[test]
    fn several_lines_are_one_list() {
        let mut headers = HeaderMap::new();
        headers.append(ACCEPT, HeaderValue::from_static("text/plain;q=0.3"));
        headers.append(ACCEPT, HeaderValue::from_static("application/openmetrics-text;q=0.4"));
        assert_eq!(Exposition::accepted(&headers), Exposition::OpenMetrics);
        headers.append(ACCEPT, HeaderValue::from_bytes(b"\xff").unwrap());
        assert_eq!(Exposition::accepted(&headers), Exposition::OpenMetrics);
    }
}
