# Base images are pinned by full version. To pin them by digest as well, or to take them from a mirror of yours:
#   docker build --build-arg RUST_IMAGE=rust@sha256:... --build-arg DEBIAN_IMAGE=debian@sha256:... .
# Both are the same Debian release, so that the C library fits. The builder has gcc, which SQLite and ring need.
ARG RUST_IMAGE=docker.io/library/rust:1.95.0-slim-bookworm
ARG DEBIAN_IMAGE=docker.io/library/debian:bookworm-20260824-slim

FROM ${RUST_IMAGE} AS build
WORKDIR /build
# What else is built in; redis: sinks that are streams of Redis.
ARG FEATURES=""
# The dependencies, in a layer of their own: it is built again when one of these two files changes, not when the sources do. An
# empty program stands in for ours.
COPY Cargo.toml Cargo.lock ./
RUN mkdir -p src benches \
    && echo 'fn main() {}' | tee src/main.rs > benches/fingerprint.rs \
    && touch src/lib.rs \
    && cargo build --profile dist --locked --bin oncegate --features "$FEATURES" \
    && rm -rf src benches
COPY src src
COPY benches benches
COPY migrations migrations
# The commit, as the metric oncegate_build_info shows it.
ARG REVISION=""
# cargo compares times, and the sources may be older than the empty program.
RUN touch src/main.rs src/lib.rs \
    && ONCEGATE_REVISION="$REVISION" cargo build --profile dist --locked --bin oncegate --features "$FEATURES"

FROM ${DEBIAN_IMAGE}
# Certificates of the public authorities, for https upstreams and sinks. The builder has them.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
RUN groupadd --system --gid 10001 oncegate \
    && useradd --system --uid 10001 --gid 10001 --home-dir /var/lib/oncegate --no-create-home oncegate \
    && install --directory --owner 10001 --group 10001 --mode 0700 /var/lib/oncegate \
    && install --directory /etc/oncegate
COPY --from=build /build/target/dist/oncegate /usr/local/bin/oncegate

LABEL org.opencontainers.image.title="Oncegate" \
      org.opencontainers.image.description="An idempotency gateway: a reverse proxy that makes retries of writes safe" \
      org.opencontainers.image.licenses="Apache-2.0"
ARG VERSION=""
ARG REVISION=""
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# Every command in the container reads this file. Mount yours there; an empty value: no file.
ENV ONCEGATE_CONFIG=/etc/oncegate/oncegate.toml
# A container is called from outside of it, so where neither the file nor ONCEGATE_SERVER_LISTEN sets `server.listen`, it is
# this instead of 127.0.0.1:8080. The admin listener stays on 127.0.0.1:9090: on any other address it needs a token.
ENV ONCEGATE_DEFAULT_LISTEN=0.0.0.0:8080
EXPOSE 8080 9090

# By number, so that `runAsNonRoot` of Kubernetes can judge it. Nothing but the working folder is written: the root file system
# may be read-only.
USER 10001:10001
# Holds the SQLite file, where that is the store, and the spill: mount a volume here.
WORKDIR /var/lib/oncegate
VOLUME /var/lib/oncegate
STOPSIGNAL SIGTERM
# Whether the process runs. `health --ready` also asks the store; an engine that restarts what is ill would restart on each outage
# of the database.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["oncegate", "health"]
ENTRYPOINT ["oncegate"]
# The relay alone: `relay` in place of this.
CMD ["serve"]
