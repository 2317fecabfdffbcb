//! What a consumer and the producer agreed on: the flags of OPEN, and what was switched by CONTROL.

use std::time::Duration;

use wire::dcp::{Open, OpenFlags};
use wire::{Feature, FeatureSet, Status};

use crate::producer::Refusal;
use crate::pulse::INTERVAL_MIN;

/// The newest form of snapshot markers that the consumer understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum MarkerVersion {
    V1,
    V2,
    V2_2,
}

#[derive(Clone, Debug)]
pub(crate) struct Terms {
    pub open: OpenFlags,
    pub features: FeatureSet,
    /// Prepares, commits and aborts are told apart; otherwise a commit is a change like any other, and there is no more.
    pub sync_writes: bool,
    pub expiry_opcode: bool,
    pub compresses: bool,
    pub stream_ids: bool,
    pub end_on_close: bool,
    pub deleted_user_xattrs: bool,
    pub marker_version: MarkerVersion,
    /// A replica's name, under which its acknowledgements count.
    pub consumer: Option<String>,
    /// Knows the statuses that are about streams.
    pub new_statuses: bool,
}

/// What a CONTROL asks for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Control {
    Noop(bool),
    NoopInterval(Duration),
    BufferBytes(u64),
    SyncWrites(bool),
    ExpiryOpcode(bool),
    Compresses(bool),
    StreamIds(bool),
    EndOnClose(bool),
    DeletedUserXattrs(bool),
    MarkerVersion(MarkerVersion),
    Consumer(String),
    NewStatuses(bool),
    /// Understood, and nothing changes by it.
    Hint,
}

impl Terms {
    pub fn of(open: &Open<'_>, features: FeatureSet) -> Result<Terms, Refusal> {
        let flags = open.flags;
        let einval = |context: &str| Err(Refusal::new(Status::Einval, context));
        if flags.unknown() != 0 {
            return einval(&format!("flags {:#x} mean nothing", flags.unknown()));
        }
        if flags.has(OpenFlags::NO_VALUE) && flags.has(OpenFlags::NO_VALUE_WITH_UNDERLYING_DATATYPE) {
            return einval("values are left out in one way or the other, not both");
        }
        if flags.has(OpenFlags::INCLUDE_DELETED_USER_XATTRS) && !flags.has(OpenFlags::INCLUDE_XATTRS) {
            return einval("user xattrs of deleted documents need xattrs to be included");
        }
        if flags.has(OpenFlags::SKIP_DELETES_IN_BACKFILL) && !features.has(Feature::DcpSkipDeletesInInitialBackfill) {
            return einval("skipping deletes was not negotiated");
        }
        Ok(Terms {
            open: flags,
            features,
            sync_writes: false,
            expiry_opcode: false,
            compresses: false,
            stream_ids: false,
            end_on_close: false,
            deleted_user_xattrs: flags.has(OpenFlags::INCLUDE_DELETED_USER_XATTRS),
            marker_version: MarkerVersion::V1,
            consumer: None,
            new_statuses: false,
        })
    }

    pub fn has_xattrs(&self) -> bool {
        self.open.has(OpenFlags::INCLUDE_XATTRS)
    }

    pub fn knows_collections(&self) -> bool {
        self.features.has(Feature::Collections)
    }

    /// The form of a marker that may say what is decided: to those that keep prepares it always does.
    pub fn marker_version(&self) -> MarkerVersion {
        if self.sync_writes { self.marker_version.max(MarkerVersion::V2) } else { self.marker_version }
    }

    /// What a control means here. `has_streams`: some can be set only before the first stream.
    pub fn control(&self, name: &[u8], value: &[u8], has_streams: bool) -> Result<Control, Refusal> {
        let refuse = |status, context: String| Err(Refusal::new(status, context));
        let shown = (name.escape_ascii().to_string(), value.escape_ascii().to_string());
        let wrong = || Refusal::new(Status::Einval, format!("{} cannot be {}", shown.0, shown.1));
        let flag = || match value {
            b"true" => Ok(true),
            b"false" => Ok(false),
            _ => Err(wrong()),
        };
        let text = || std::str::from_utf8(value).map_err(|_| wrong());
        let choice = |choices: &[&[u8]]| if choices.contains(&value) { Ok(Control::Hint) } else { Err(wrong()) };
        Ok(match name {
            b"enable_noop" => Control::Noop(flag()?),
            b"set_noop_interval" => {
                let seconds = text()?.parse::<f64>().map_err(|_| wrong())?;
                let interval = Duration::try_from_secs_f64(seconds).map_err(|_| wrong())?;
                if interval < INTERVAL_MIN {
                    return refuse(Status::Einval, format!("the interval is at least {INTERVAL_MIN:?}"));
                }
                Control::NoopInterval(interval)
            }
            b"connection_buffer_size" => Control::BufferBytes(text()?.parse::<u32>().map_err(|_| wrong())?.into()),
            b"enable_sync_writes" => match flag()? {
                true if self.stream_ids => {
                    return refuse(Status::NotSupported, "sync writes and stream ids exclude each other".into());
                }
                on => Control::SyncWrites(on),
            },
            b"enable_expiry_opcode" => match flag()? {
                true if !self.open.has(OpenFlags::INCLUDE_DELETE_TIMES) => {
                    return refuse(Status::Einval, "expirations need delete times to be included".into());
                }
                on => Control::ExpiryOpcode(on),
            },
            b"force_value_compression" => match flag()? {
                true if !self.features.has(Feature::Snappy) => {
                    return refuse(Status::Einval, "Snappy was not negotiated".into());
                }
                on => Control::Compresses(on),
            },
            b"enable_stream_id" => match flag()? {
                true if self.sync_writes => {
                    return refuse(Status::NotSupported, "sync writes and stream ids exclude each other".into());
                }
                _ if has_streams => return refuse(Status::NotSupported, "there are streams already".into()),
                on => Control::StreamIds(on),
            },
            b"send_stream_end_on_client_close_stream" => Control::EndOnClose(flag()?),
            b"include_deleted_user_xattrs" => Control::DeletedUserXattrs(flag()?),
            b"max_marker_version" if !self.knows_collections() => {
                return refuse(Status::NotSupported, "other markers need collections to be negotiated".into());
            }
            b"max_marker_version" => match value {
                b"2.0" => Control::MarkerVersion(MarkerVersion::V2),
                b"2.2" => Control::MarkerVersion(MarkerVersion::V2_2),
                _ => return Err(wrong()),
            },
            b"consumer_name" if value.is_empty() => return Err(wrong()),
            b"consumer_name" => Control::Consumer(text()?.to_owned()),
            b"v7_dcp_status_codes" => Control::NewStatuses(flag()?),
            b"set_priority" => choice(&[b"high", b"medium", b"low"])?,
            b"backfill_order" => choice(&[b"round-robin", b"sequential"])?,
            // A stream is never dropped for being slow, and how much a document is used is not told.
            b"supports_cursor_dropping" | b"supports_cursor_dropping_vulcan" | b"supports_hifi_MFU" => {
                flag()?;
                Control::Hint
            }
            b"stream_buffer_size" => {
                return refuse(Status::NotSupported, "streams have no buffers of their own".into());
            }
            _ => return refuse(Status::Einval, format!("there is nothing called {} to control", shown.0)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(flags: OpenFlags, features: &[Feature]) -> Result<Terms, Status> {
        let open = Open { flags, name: b"n", details: b"" };
        Terms::of(&open, FeatureSet::of(features)).map_err(|refusal| refusal.status)
    }

    #[test]
    fn open_flags_that_mean_nothing_together_are_refused() {
        assert!(terms(OpenFlags::PRODUCER, &[]).is_ok());
        for flags in [
            OpenFlags(0x02),
            OpenFlags(0x10000),
            OpenFlags::NO_VALUE.with(OpenFlags::NO_VALUE_WITH_UNDERLYING_DATATYPE),
            OpenFlags::INCLUDE_DELETED_USER_XATTRS,
            OpenFlags::SKIP_DELETES_IN_BACKFILL,
        ] {
            assert_eq!(terms(flags, &[]).err(), Some(Status::Einval), "{flags:?}");
        }
    }

    #[test]
    fn controls_are_understood_or_refused_each_for_itself() {
        let plain = terms(OpenFlags::PRODUCER, &[]).unwrap();
        let rich = terms(OpenFlags::INCLUDE_DELETE_TIMES, &[Feature::Snappy, Feature::Collections]).unwrap();
        let ask = |terms: &Terms, name: &str, value: &str| {
            terms.control(name.as_bytes(), value.as_bytes(), false).map_err(|refusal| refusal.status)
        };
        assert_eq!(ask(&plain, "enable_noop", "true"), Ok(Control::Noop(true)));
        assert_eq!(ask(&plain, "set_noop_interval", "180"), Ok(Control::NoopInterval(Duration::from_secs(180))));
        assert_eq!(ask(&plain, "set_noop_interval", "0.5"), Ok(Control::NoopInterval(Duration::from_millis(500))));
        assert_eq!(ask(&plain, "connection_buffer_size", "10485760"), Ok(Control::BufferBytes(10 << 20)));
        assert_eq!(ask(&plain, "set_priority", "high"), Ok(Control::Hint));
        assert_eq!(ask(&rich, "enable_expiry_opcode", "true"), Ok(Control::ExpiryOpcode(true)));
        assert_eq!(ask(&rich, "max_marker_version", "2.2"), Ok(Control::MarkerVersion(MarkerVersion::V2_2)));
        for (name, value, status) in [
            ("enable_expiry_opcode", "true", Status::Einval),
            ("force_value_compression", "true", Status::Einval),
            ("max_marker_version", "2.2", Status::NotSupported),
            ("enable_noop", "yes", Status::Einval),
            ("set_noop_interval", "0.01", Status::Einval),
            ("set_noop_interval", "-1", Status::Einval),
            ("set_noop_interval", "nan", Status::Einval),
            ("connection_buffer_size", "-1", Status::Einval),
            ("stream_buffer_size", "1", Status::NotSupported),
            ("change_streams", "true", Status::Einval),
            ("enable_out_of_order_snapshots", "true", Status::Einval),
        ] {
            assert_eq!(ask(&plain, name, value), Err(status), "{name}");
        }
        let late = plain.control(b"enable_stream_id", b"true", true);
        assert_eq!(late.map_err(|refusal| refusal.status), Err(Status::NotSupported));
    }
}
