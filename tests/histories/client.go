package histories

import (
	"encoding/binary"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/couchbase/gocbcore/v10/memd"
)

const (
	user     = "Administrator"
	password = "eleven storks"
	bucket   = "default"
)

const (
	// dialMax is how long a connection may take to be made.
	dialMax = 500 * time.Millisecond
	// durableMax is how long a node may try to have a write acknowledged by others.
	durableMax = 1500 * time.Millisecond
	// answerMax is when a client gives up, later than the node should.
	answerMax = 2500 * time.Millisecond
)

// Coordinator verbs that clients have no use for.
const (
	setVbucket       = memd.CmdCode(0x3d)
	createBucket     = memd.CmdCode(0x85)
	setClusterConfig = memd.CmdCode(0xb4)
)

// notMine is why a node does nothing about a vBucket that is not active there.
var notMine = fmt.Sprintf("%#x", uint16(memd.StatusNotMyVBucket))

// features in the order they are asked for.
var features = []memd.HelloFeature{
	memd.FeatureXerror, memd.FeatureSelectBucket, memd.FeatureAltRequests, memd.FeatureSyncReplication,
	memd.FeatureTCPNoDelay,
}

// conn is one connection with one request under way at most. The SDKs would try again by themselves, choose the node, and hide
// what was answered first.
type conn struct {
	socket net.Conn
	packet *memd.Conn
	// patience is how long any one answer may take.
	patience time.Duration
}

// dial makes a connection to a bucket, or to none, which is how an administrator speaks to a node.
func dial(address, bucket string, patience time.Duration) (*conn, error) {
	socket, err := net.DialTimeout("tcp", address, dialMax)
	if err != nil {
		return nil, err
	}
	c := &conn{socket, memd.NewConn(socket), patience}
	if err := c.logIn(bucket); err != nil {
		c.close()
		return nil, fmt.Errorf("log in at %s: %w", address, err)
	}
	return c, nil
}

func (c *conn) logIn(bucket string) error {
	var codes []byte
	for _, feature := range features {
		codes = binary.BigEndian.AppendUint16(codes, uint16(feature))
		c.packet.EnableFeature(feature)
	}
	steps := []memd.Packet{
		{Command: memd.CmdHello, Key: []byte("settee-histories"), Value: codes},
		{Command: memd.CmdSASLAuth, Key: []byte("PLAIN"), Value: []byte("\x00" + user + "\x00" + password)},
	}
	if bucket != "" {
		steps = append(steps, memd.Packet{Command: memd.CmdSelectBucket, Key: []byte(bucket)})
	}
	for _, step := range steps {
		if _, err := c.succeed(step); err != nil {
			return err
		}
	}
	return nil
}

func (c *conn) close() {
	_ = c.socket.Close()
}

// call sends a request and waits for its answer. After an error the connection is of no use: an answer may still come.
func (c *conn) call(request memd.Packet) (*memd.Packet, error) {
	request.Magic = memd.CmdMagicReq
	if err := c.socket.SetDeadline(time.Now().Add(c.patience)); err != nil {
		return nil, err
	}
	if err := c.packet.WritePacket(&request); err != nil {
		return nil, err
	}
	answer, _, err := c.packet.ReadPacket()
	return answer, err
}

func (c *conn) succeed(request memd.Packet) (*memd.Packet, error) {
	answer, err := c.call(request)
	if err != nil {
		return nil, err
	}
	if answer.Status != memd.StatusSuccess {
		return nil, fmt.Errorf("%v: status %#x %s", request.Command, uint16(answer.Status), answer.Value)
	}
	return answer, nil
}

// request is what an operation looks like on the wire. A swap presents the CAS of the version it expects.
func (op Op) request(vb uint16, expected uint64) memd.Packet {
	request := memd.Packet{Vbucket: vb, Key: []byte(op.Key)}
	switch op.Kind {
	case Get:
		request.Command = memd.CmdGet
		return request
	case Replica:
		request.Command = memd.CmdGetReplica
		return request
	case Delete:
		request.Command = memd.CmdDelete
	case Add:
		request.Command = memd.CmdAdd
	case Set:
		request.Command = memd.CmdSet
	case Swap:
		request.Command, request.Cas = memd.CmdReplace, expected
	}
	if op.Kind != Delete {
		request.Extras, request.Value = make([]byte, 8), strconv.AppendUint(nil, uint64(op.Writes), 10)
	}
	request.DurabilityLevelFrame = &memd.DurabilityLevelFrame{DurabilityLevel: memd.DurabilityLevel(op.Level)}
	request.DurabilityTimeoutFrame = &memd.DurabilityTimeoutFrame{DurabilityTimeout: durableMax}
	return request
}

// answered fills in what the answer says.
func (op *Op) answered(answer *memd.Packet) error {
	op.Outcome, op.Cas = Done, answer.Cas
	isRead := op.Kind == Get || op.Kind == Replica
	switch status := answer.Status; status {
	case memd.StatusSuccess:
		if isRead {
			version, err := strconv.ParseUint(string(answer.Value), 10, 64)
			if err != nil {
				return fmt.Errorf("%s holds %q, which nobody wrote", op.Key, answer.Value)
			}
			op.Found = Version(version)
		}
	case memd.StatusKeyNotFound:
		if !isRead {
			op.Outcome, op.Missing = Refused, true
		}
	case memd.StatusKeyExists, memd.StatusNotStored:
		op.Outcome = Refused
	case memd.StatusSyncWriteAmbiguous:
		op.Outcome = Ambiguous
	case memd.StatusNotMyVBucket, memd.StatusDurabilityImpossible, memd.StatusSyncWriteInProgress,
		memd.StatusSyncWriteReCommitInProgress, memd.StatusTmpFail, memd.StatusBusy:
		op.Outcome = Failed
	default:
		op.Outcome = Ambiguous
		return fmt.Errorf("%v: unexpected status %#x %s", op, uint16(status), answer.Value)
	}
	if op.Outcome != Done {
		op.Why = fmt.Sprintf("%#x", uint16(answer.Status))
	}
	return nil
}
