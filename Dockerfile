# The builder and the runtime are the same Debian release, so that the C library fits.
FROM rust:1-slim-bookworm AS build
# SQLite is C and is built in.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY . .
RUN cargo build --release --locked --bin oncegate

FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --home-dir /var/lib/oncegate --create-home oncegate
COPY --from=build /build/target/release/oncegate /usr/local/bin/oncegate
USER oncegate
# The working folder holds the SQLite file, where that is the store, and the spill: mount a volume here.
WORKDIR /var/lib/oncegate
VOLUME /var/lib/oncegate
EXPOSE 8080 9090
STOPSIGNAL SIGTERM
ENTRYPOINT ["oncegate"]
# The relay alone: `relay --config /etc/oncegate/oncegate.toml` in place of this.
CMD ["serve", "--config", "/etc/oncegate/oncegate.toml"]
