//! HELLO: which optional behaviours a connection switches on. Every HELLO starts from nothing.

use crate::frame::u16_at;
use crate::parse::ParseError;
use crate::status::Status;

macro_rules! features {
    ($($code:literal $variant:ident $name:literal;)*) => {
        /// An optional behaviour. The discriminant is the wire's; echoing it is a promise.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Feature { $($variant = $code,)* }

        impl Feature {
            /// Every feature a server could echo, by ascending code.
            pub const ALL: &'static [Feature] = &[$(Feature::$variant,)*];

            pub const fn from_wire(code: u16) -> Option<Feature> {
                match code {
                    $($code => Some(Feature::$variant),)*
                    _ => None,
                }
            }

            pub const fn name(self) -> &'static str {
                match self { $(Feature::$variant => $name,)* }
            }
        }
    };
}

// Left out because they are never echoed: 01, 09, 16 (retired), 02 (TLS, chosen by port), 05 (TcpDelay).
features! {
    0x03 TcpNoDelay "tcp nodelay";
    0x04 MutationSeqno "mutation seqno";
    0x06 Xattr "xattr";
    0x07 Xerror "xerror";
    0x08 SelectBucket "select bucket";
    0x0a Snappy "snappy";
    0x0b Json "json";
    0x0c Duplex "duplex";
    0x0d ClustermapChangeNotification "clustermap change notification";
    0x0e UnorderedExecution "unordered execution";
    0x0f Tracing "tracing";
    0x10 AltRequestSupport "alt request support";
    0x11 SyncReplication "sync replication";
    0x12 Collections "collections";
    0x13 SnappyEverywhere "snappy everywhere";
    0x14 PreserveTtl "preserve ttl";
    0x15 VAttr "virtual attributes";
    0x17 SubdocCreateAsDeleted "subdoc create as deleted";
    0x18 SubdocDocumentMacroSupport "subdoc document macro support";
    0x19 SubdocReplaceBodyWithXattr "subdoc replace body with xattr";
    0x1a ReportUnitUsage "report unit usage";
    0x1b NonBlockingThrottlingMode "non-blocking throttling mode";
    0x1c SubdocReplicaRead "subdoc replica read";
    0x1d GetClusterConfigWithKnownVersion "get cluster config with known version";
    0x1e DedupeNotMyVbucketClustermap "dedupe not my vbucket clustermap";
    0x1f ClustermapChangeNotificationBrief "clustermap change notification brief";
    0x20 SubdocAllowsAccessOnMultipleXattrKeys "subdoc allows access on multiple xattr keys";
    0x21 SubdocBinaryXattr "subdoc binary xattr";
    0x22 RangeScanIncludeXattr "range scan include xattr";
    0x23 SubdocAllowReplicaReadOnDeletedDocs "subdoc allow replica read on deleted docs";
    0x24 GetRandomKeyIncludeXattr "get random key include xattr";
    0x25 MutateWithMeta "mutate with meta";
    0x26 DcpSkipDeletesInInitialBackfill "dcp skip deletes in initial backfill";
}

impl Feature {
    /// What else must be asked for in the same HELLO.
    pub const fn needs(self) -> &'static [Feature] {
        match self {
            Feature::ClustermapChangeNotification | Feature::ClustermapChangeNotificationBrief => &[Feature::Duplex],
            Feature::VAttr | Feature::SubdocDocumentMacroSupport | Feature::RangeScanIncludeXattr => &[Feature::Xattr],
            Feature::GetRandomKeyIncludeXattr => &[Feature::Xattr, Feature::Json, Feature::SnappyEverywhere],
            _ => &[],
        }
    }
}

/// A set of features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FeatureSet(u64);

impl FeatureSet {
    pub const EMPTY: FeatureSet = FeatureSet(0);

    pub const fn of(features: &[Feature]) -> FeatureSet {
        let mut set = FeatureSet::EMPTY;
        let mut i = 0;
        while i < features.len() {
            set = set.with(features[i]);
            i += 1;
        }
        set
    }

    #[must_use]
    pub const fn with(self, feature: Feature) -> FeatureSet {
        FeatureSet(self.0 | 1 << feature as u8)
    }

    pub const fn has(self, feature: Feature) -> bool {
        self.0 & 1 << feature as u8 != 0
    }

    /// By ascending code.
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.iter().copied().filter(move |&feature| self.has(feature))
    }

    /// Appends the value of a HELLO reply: the codes, ascending, two bytes each.
    pub fn encode(self, out: &mut Vec<u8>) {
        for feature in self.iter() {
            out.extend_from_slice(&u16::from(feature as u8).to_be_bytes());
        }
    }

    /// The datatype bits a connection with these features may send and receive.
    pub const fn datatypes(self) -> u8 {
        self.has(Feature::Json) as u8 | (self.has(Feature::Snappy) as u8) << 1 | (self.has(Feature::Xattr) as u8) << 2
    }
}

/// The features a HELLO asks for, as sent: pairs of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestedFeatures<'a>(&'a [u8]);

impl<'a> RequestedFeatures<'a> {
    /// # Errors
    /// `Einval` for an odd number of bytes.
    pub fn parse(value: &'a [u8]) -> Result<RequestedFeatures<'a>, ParseError> {
        match value.len() % 2 {
            0 => Ok(RequestedFeatures(value)),
            _ => Err(ParseError::new(Status::Einval, "the features of a HELLO take 2 bytes each")),
        }
    }

    pub fn codes(self) -> impl Iterator<Item = u16> + 'a {
        self.0.chunks_exact(2).map(|pair| u16_at(pair, 0))
    }
}

/// The connection's features from now on, replacing all it had: what was asked for and is supported.
///
/// # Errors
/// `Einval` when a supported feature is asked for without one it depends on.
pub fn negotiate(requested: RequestedFeatures<'_>, supported: FeatureSet) -> Result<FeatureSet, ParseError> {
    let asked = requested.codes().filter_map(Feature::from_wire).fold(FeatureSet::EMPTY, FeatureSet::with);
    let mut agreed = FeatureSet(asked.0 & supported.0);
    for feature in agreed.iter() {
        let needs = FeatureSet::of(feature.needs());
        if needs.0 & !asked.0 != 0 {
            let missing: Vec<&str> = FeatureSet(needs.0 & !asked.0).iter().map(Feature::name).collect();
            let context = format!("feature {} needs {}", feature.name(), missing.join(" and "));
            return Err(ParseError::new(Status::Einval, context));
        }
        if needs.0 & !supported.0 != 0 {
            agreed.0 &= !(1 << feature as u8);
        }
    }
    Ok(agreed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(codes: &[u16]) -> Vec<u8> {
        codes.iter().flat_map(|c| c.to_be_bytes()).collect()
    }

    fn ask(codes: &[u16], supported: FeatureSet) -> Result<Vec<u16>, Status> {
        let value = bytes(codes);
        let requested = RequestedFeatures::parse(&value).expect("even");
        let agreed = negotiate(requested, supported).map_err(|e| e.status)?;
        let mut echo = Vec::new();
        agreed.encode(&mut echo);
        Ok(RequestedFeatures::parse(&echo).expect("even").codes().collect())
    }

    const EVERYTHING: FeatureSet = FeatureSet::of(Feature::ALL);

    #[test]
    fn codes_ascend_and_are_found_again() {
        assert!(Feature::ALL.is_sorted());
        assert!(Feature::ALL.iter().all(|&f| Feature::from_wire(f as u16) == Some(f)));
        assert!([0x01, 0x02, 0x05, 0x09, 0x16, 0x27, 0x103].iter().all(|&code| Feature::from_wire(code).is_none()));
    }

    #[test]
    fn the_echo_is_what_was_asked_and_is_supported_in_ascending_order() {
        let lcb = [2, 6, 0xb, 0xc, 0x1f, 0x1d, 0x1e, 8, 7, 3, 0xa, 0x13, 4, 0xf, 0x12, 0xe, 0x17, 0x14];
        let all = [3, 4, 6, 7, 8, 0xa, 0xb, 0xc, 0xe, 0xf, 0x12, 0x13, 0x14, 0x17, 0x1d, 0x1e, 0x1f];
        assert_eq!(ask(&lcb, EVERYTHING), Ok(all.to_vec()));
        let few = FeatureSet::of(&[Feature::SelectBucket, Feature::Collections, Feature::SyncReplication]);
        assert_eq!(ask(&lcb, few), Ok(vec![8, 0x12]));
        assert_eq!(ask(&[6, 6, 6, 0xeeee], EVERYTHING), Ok(vec![6]));
        assert_eq!(ask(&[], EVERYTHING), Ok(vec![]));
    }

    #[test]
    fn a_feature_without_what_it_needs_is_refused() {
        for codes in [&[0x0d][..], &[0x1f], &[0x15], &[0x18], &[0x22], &[0x24, 6, 0xb], &[0x24, 0x13, 0xb]] {
            assert_eq!(ask(codes, EVERYTHING), Err(Status::Einval), "{codes:x?}");
            assert_eq!(ask(codes, FeatureSet::of(&[Feature::Xerror])).map(|e| e.is_empty()), Ok(true));
        }
        assert_eq!(ask(&[0x24, 0x13, 0xb, 6], EVERYTHING), Ok(vec![6, 0xb, 0x13, 0x24]));
        assert_eq!(ask(&[0x0d, 0x0c], EVERYTHING), Ok(vec![0x0c, 0x0d]));
    }

    #[test]
    fn a_feature_is_not_echoed_while_what_it_needs_is_not_built() {
        let without_duplex = FeatureSet::of(&[Feature::ClustermapChangeNotification, Feature::Xattr]);
        assert_eq!(ask(&[0x0c, 0x0d, 6], without_duplex), Ok(vec![6]));
    }

    #[test]
    fn an_odd_list_is_refused() {
        assert_eq!(RequestedFeatures::parse(&[0, 6, 0]).map_err(|e| e.status), Err(Status::Einval));
    }
}
